"""Qwen 3, dense: an RMS norm on each head's q and k, head size independent of the hidden size, no biases."""

from .base import ModelFamily


class Qwen3(ModelFamily):
    model_type = "qwen3"
    class_prefix = "Qwen3"
    qk_norm = True
    default_head_dim = 128
    default_max_positions = 32768
    refused = {"attention_bias": (False, None)}
