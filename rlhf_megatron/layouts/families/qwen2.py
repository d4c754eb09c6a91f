"""Qwen 2 and 2.5, dense: biases on q, k and v."""

from .base import ModelFamily


class Qwen2(ModelFamily):
    model_type = "qwen2"
    class_prefix = "Qwen2"
    qkv_bias = True
    default_max_positions = 32768
