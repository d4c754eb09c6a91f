"""Algorithms by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rlhf_megatron.algorithms.base import Algorithm

_ALGORITHMS: dict[str, Algorithm] = {}


def register(name: str) -> Callable[[Algorithm], Algorithm]:
    """`register("mine")(Algorithm(...))`: makes it available as `algorithm.name: mine`. A name is taken once."""

    def enter(algorithm: Algorithm) -> Algorithm:
        if name != algorithm.name:
            raise ValueError(f"the algorithm is called {algorithm.name!r} but is registered as {name!r}: use one name")
        if name in _ALGORITHMS and _ALGORITHMS[name] is not algorithm:
            raise ValueError(f"algorithm {name!r} is already registered: choose another name")
        _ALGORITHMS[name] = algorithm
        return algorithm

    return enter


def get(name: str) -> Algorithm:
    """The algorithm of that name. Raises ValueError that lists the known names and the nearest one."""
    if name not in _ALGORITHMS:
        near = difflib.get_close_matches(name, _ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"algorithm.name {name!r} is not known: it is one of {', '.join(names())}{hint}")
    return _ALGORITHMS[name]


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_ALGORITHMS)
