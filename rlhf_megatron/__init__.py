"""RLHF training of language models whose trained roles are Megatron models."""

__version__ = "0.1.0"
