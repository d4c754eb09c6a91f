"""Transports: where the loop runs and how its calls reach the ranks. One config key, cluster.transport, chooses."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = {"inline": "inline", "torchrun": "torchrun"}


def transport(name: str) -> ModuleType:
    """The transport module; it has `run(config, roles, loop, log_folder=None, prepare=...) -> int`.

    Raises:
        ValueError: no such transport.
    """
    if name not in _MODULES:
        raise ValueError(f"cluster.transport={name!r}: this version has {', '.join(_MODULES)}")
    return importlib.import_module(f"{__name__}.{_MODULES[name]}")
