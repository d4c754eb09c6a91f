"""Metrics of one global batch that no single stage can report: rewards and components, truncation, entropy, the
log-prob gap."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.algorithms import base
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.observe.metrics import Mean, Metric


def reward_metrics(batch: DataProto) -> dict[str, Metric]:
    """reward/*, response/* and one reward/<component> per component that the reward function named."""
    mask = batch["response_mask"].pad(False)
    metrics = base.reward_metrics(batch["token_level_scores"].pad(0.0), mask)
    metrics["response/truncated"] = Mean(sum(reason == "length" for reason in batch["finish_reason"]), len(batch))
    components: list[dict[str, float]] = batch["reward_components"] if "reward_components" in batch else []
    for name in sorted({key for row in components for key in row}):
        values = [row[name] for row in components if name in row]
        metrics[f"reward/{name}"] = Mean(float(sum(values)), len(values))
    return metrics


def policy_metrics(batch: DataProto, config: Any) -> dict[str, Metric]:
    """actor/entropy before the update, and rollout/log_prob_gap where sampler and trainer score one distribution.

    The trainer scores at the sampling temperature. So the sampler's raw log-probs are comparable at temperature 1 only,
    and its processed ones always, but for the renormalisation of top-p and top-k.
    """
    mask = batch["response_mask"].pad(False)
    metrics: dict[str, Metric] = {}
    if "entropy" in batch and config.algorithm.entropy_coefficient == 0.0:  # else the loss reports it
        entropy = batch["entropy"].pad(0.0)
        metrics["actor/entropy"] = Mean(torch.where(mask, entropy, 0.0).sum(dtype=torch.float64), mask.sum())
    comparable = config.generation.log_probs == "processed" or config.generation.temperature == 1.0
    if comparable and "rollout_log_probs" in batch:
        metrics |= base.log_prob_gap(batch["old_log_probs"].pad(0.0), batch["rollout_log_probs"].pad(0.0), mask)
    return metrics
