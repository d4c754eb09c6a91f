"""Llama 2 and 3.x, SmolLM2 and what else says model_type "llama": no biases, no qk norm."""

from .base import ModelFamily


class Llama(ModelFamily):
    model_type = "llama"
    class_prefix = "Llama"
    refused = {"attention_bias": (False, None), "mlp_bias": (False, None)}
