"""Estimators and losses: pure functions on tensors and masks. Importing the package registers the algorithms in it."""

from rlhf_megatron.algorithms import grpo, ppo  # noqa: F401
