"""Full copies in published names: HF directories and engines that hold the whole model. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from .boxes import Box, Index, Layout, Placement
from .families import family_for, family_of
from .spec import ModelSpec


class HFLayout(Layout):
    """Every rank of `ranks` (a count, or the ranks) holds all canonical tensors; local names are the canonical ones."""

    def __init__(self, spec: ModelSpec, ranks: int | Iterable[int] = 1, head: str = "lm") -> None:
        self.spec, self.head = spec, head
        self._ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @cached_property
    def _shapes(self) -> dict[str, Index]:
        return family_of(self.spec.family).canonical_shapes(self.spec, self.head)

    @cached_property
    def _placements(self) -> tuple[Placement, ...]:
        return tuple(Placement(Box(name, (0,) * len(shape), shape), name, (0,) * len(shape))
                     for name, shape in self._shapes.items())

    def canonical_shapes(self) -> dict[str, Index]:
        return self._shapes

    def placements(self, rank: int) -> tuple[Placement, ...]:
        return self._placements

    def local_shapes(self, rank: int) -> dict[str, Index]:
        return self._shapes

    def __str__(self) -> str:
        return f"full copy of {self.spec.family} on {len(self.ranks)} ranks"


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of an HF directory. FileNotFoundError / ValueError name the file."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; an HF model directory has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, not an object")
    return config


def read_spec(directory: str | Path) -> ModelSpec:
    """ModelSpec of an HF directory."""
    config = read_config(directory)
    try:
        return family_for(config).spec(config)
    except ValueError as error:
        raise ValueError(f"{Path(directory) / 'config.json'}: {error}") from None
