"""The workers of one rank: built once, then called. The same code under every transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron import devices
from rlhf_megatron.controller import wire
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.workers.base import KINDS, MethodSpec, RankContext, Replica, Worker, methods_of


class Workers:
    """All roles of one rank.

    Args:
        config: the job's config, equal on every rank.
        roles: worker class by role.
        context: this rank's place in its pool.
    """

    def __init__(self, config: Any, roles: Mapping[str, type[Worker]], context: RankContext) -> None:
        self.config, self.roles, self.context = config, roles, context
        self.built: dict[str, Worker] = {}
        self.methods: dict[str, dict[str, MethodSpec]] = {}

    def build(self, role: str) -> None:
        """Construct a role's worker, and the process groups of its replicas. Collective over the pool."""
        worker = self.roles[role](role, self.config, self.context)
        if not hasattr(worker, "context"):
            raise TypeError(f"{type(worker).__qualname__}.__init__ must call super().__init__(role, config, context)")
        self.methods[role] = methods_of(type(worker))
        used = {spec.split for spec in self.methods[role].values()}
        for kind in KINDS:
            if kind in used:
                worker.replica_group(kind)
        self.built[role] = worker

    def call(self, role: str, method: str, kwargs: dict[str, Any], rows: DataProto | None) -> Any:
        """Run a method on this rank. `rows`: the replica's rows on its entry rank, None on its other ranks."""
        worker = self.built[role]
        spec = self.methods[role][method]
        if spec.split is None:
            with worker.phase(spec):
                return getattr(worker, method)(**kwargs)
        part = share_rows(rows, worker.replica(spec.split), worker.replica_group(spec.split), self.context.rank)
        with worker.phase(spec):
            return getattr(worker, method)(part.to(devices.device()), **kwargs)

    def close(self) -> None:
        """Close the workers, last built first."""
        while self.built:
            _, worker = self.built.popitem()
            worker.close()


def share_rows(rows: DataProto | None, replica: Replica, group: Any, rank: int) -> DataProto:
    """The replica's rows on every rank of it: two broadcasts from the entry rank (sizes, then one flat buffer)."""
    entry = rank == replica.entry
    assert rows is not None or not entry, "the entry rank was sent no rows"
    if group is None and rows is not None:
        return rows
    device = devices.device()
    flat = wire.flatten(wire.pack(rows)) if entry else None
    size = torch.tensor([0 if flat is None else flat.numel()], dtype=torch.int64, device=device)
    dist.broadcast(size, src=replica.entry, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device) if flat is None else flat.to(device)
    dist.broadcast(buffer, src=replica.entry, group=group)
    return rows if rows is not None else wire.unflatten(buffer.cpu())
