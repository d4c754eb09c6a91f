"""Model families by HF `model_type`. A new family is one file here and one line in FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import ModelFamily
from .llama import Llama
from .qwen2 import Qwen2
from .qwen3 import Qwen3

FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in (Llama(), Qwen2(), Qwen3())}

__all__ = ["FAMILIES", "ModelFamily", "family_for", "family_of"]


def family_for(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.json. ValueError lists the known ones."""
    return family_of(hf_config.get("model_type"))


def family_of(name: str | None) -> ModelFamily:
    """The family of a ModelSpec's `family`."""
    if name not in FAMILIES:
        raise ValueError(f"model_type={name!r} is not a known model family; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
