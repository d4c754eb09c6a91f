"""What is on this rank's device in which phase, and how much memory each phase took.

A phase is one call of a declared method. All roles of a rank share one `Residency`: what one of them does not need is
room for another. Nothing moves between two calls that need the same, such as the updates of one role's mini-batches.
Where a critic and an actor on the same ranks take turns, mini-batch by mini-batch, each turn moves what is offloaded of
both: larger mini-batches, or a pool for each, save that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron import devices
from rlhf_megatron.mcore.engine import MegatronEngine
from rlhf_megatron.mcore.offload import PARTS
from rlhf_megatron.observe.metrics import Max, Metric
from rlhf_megatron.workers.base import MethodSpec, RankContext


class Residency:
    """Moves the parts of all roles of one rank, and measures."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[MegatronEngine, tuple[str, ...]]] = {}
        self._measured: dict[str, float] = {}  # MiB by metric name, since the last report
        self._now: str | None = None

    @classmethod
    def of(cls, context: RankContext) -> Residency:
        """The one of this rank."""
        return context.shared.setdefault("residency", cls())

    def add(self, role: str, engine: MegatronEngine, offload: tuple[str, ...]) -> None:
        """From now on these parts of the role are away whenever no phase needs them, also while others are built."""
        self._roles[role] = engine, offload
        engine.offload(*offload)

    @contextmanager
    def phase(self, role: str, spec: MethodSpec) -> Iterator[None]:
        """Around one call. What it does not need leaves before what it needs comes: both at once may not fit."""
        needed = PARTS if spec.needs is None else spec.needs
        for name, (engine, offload) in self._roles.items():
            engine.offload(*(part for part in offload if name != role or part not in needed))
        self._roles[role][0].reload(*needed)
        if spec.split is not None:  # work on rows; checkpoints and the like are no phase of a step
            self._now = f"perf/memory_peak_mb_{role}_{spec.name}"
            away = sum(engine.storages.bytes_away() for engine, _ in self._roles.values())
            self._keep("perf/memory_offloaded_mb", away / 2**20)
            devices.reset_memory_peak()
        try:
            yield
            self._end()
        finally:
            self._now = None

    def report(self, group: Any) -> dict[str, Metric]:
        """Called at the end of an update: peaks of the phases since the last report, this one included.

        The maximum over the replica's ranks, of which the loop hears only one. Collective over `group` (None: this
        rank alone); all its ranks have run the same phases.
        """
        self._end()
        names = sorted(self._measured)
        values = torch.tensor([self._measured[name] for name in names], dtype=torch.float64, device=devices.device())
        if group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        self._measured = {}
        return {name: Max(value) for name, value in zip(names, values.tolist(), strict=True)}

    def _end(self) -> None:
        """Note the peak of the phase that runs, once."""
        if self._now is not None:
            peak = devices.memory_peak_mb()
            self._keep(self._now, peak)
            self._keep("perf/memory_peak_mb", peak)
            self._now = None

    def _keep(self, name: str, value: float) -> None:
        self._measured[name] = max(value, self._measured.get(name, 0.0))
