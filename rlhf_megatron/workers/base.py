"""Worker: one role in one process, and how it declares the methods that the loop may call.

    class Scorer(Worker):
        @method(reads=("prompts", "responses"), returns=("scores",), split="train")
        def score(self, batch): ...

The declaration is all that dispatch needs: which fields of the batch leave the loop, over which replicas the rows are
split, and which fields come back. Nothing here starts a process or opens a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.layouts.spec import ParallelLayout

KINDS = ("train", "generate")
TOKENS = (1.0, 0.0)  # a row costs its tokens
_MARK = "__rlhf_method__"


@dataclass(frozen=True)
class MethodSpec:
    """What a method declared. `split` None: every rank is called with the same arguments. `needs` None: all."""

    name: str
    reads: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    split: str | None = None
    needs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Replica:
    """Pool ranks that together hold one copy of a role's model: rows enter at `entry`, results leave at `output`."""

    ranks: tuple[int, ...]
    entry: int
    output: int


@dataclass(frozen=True)
class RankContext:
    """Where a worker lives. `rank` and `size` are those of the pool's world; `job_rank` counts over all pools."""

    rank: int
    size: int
    pool: str
    job_rank: int
    seed: int
    # shared by the roles of the rank
    shared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _groups: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def method(
    reads: Iterable[str] = (), returns: Iterable[str] = (), split: str | None = None, optional: Iterable[str] = (),
    needs: Iterable[str] | None = None,
) -> Callable[[Callable], Callable]:
    """Declare a worker method that the loop may call.

    Args:
        reads: fields of the batch that the method needs; a missing one is an error that names the stage.
        returns: fields of the DataProto that it returns; others are dropped on the way back.
        split: "train" or "generate": rows are split over the replicas of that layout, every rank of a replica gets its
            replica's rows, and the replica's output rank returns a DataProto with as many rows, a dict of metrics, or
            (DataProto, metrics). None: no rows; every rank is called and pool rank 0's result is returned.
        optional: fields that are sent when the batch has them.
        needs: parts of the role's own model that have to be on the device (`parameters`, `gradients`, `optimizer`);
            None: all of them. What is configured to be offloaded and not needed is away while the method runs.
    """
    if split is not None and split not in KINDS:
        raise ValueError(f"split={split!r}: must be one of {KINDS} or None")
    for what, names in (("reads", reads), ("returns", returns), ("optional", optional), ("needs", needs)):
        if isinstance(names, str):
            raise ValueError(f"{what}={names!r}: a tuple of names is needed, write ({names!r},)")
    if split is None and (reads or returns or optional):
        raise ValueError("reads, optional and returns name rows' fields: they need split='train' or split='generate'")

    def mark(function: Callable) -> Callable:
        spec = MethodSpec(function.__name__, tuple(reads), tuple(optional), tuple(returns), split,
                          None if needs is None else tuple(needs))
        setattr(function, _MARK, spec)
        return function

    return mark


def methods_of(worker_cls: type) -> dict[str, MethodSpec]:
    """Declared methods by name. An override without its own declaration keeps the overridden method's."""
    found: dict[str, MethodSpec] = {}
    for cls in worker_cls.__mro__:
        for name, attribute in vars(cls).items():
            spec = getattr(attribute, _MARK, None)
            if spec is not None:
                found.setdefault(name, spec)
    return found


class Worker:
    """One rank of one role.

    A subclass builds its models in `__init__`, which runs on every rank of the role's pool, at the same time and in the
    same order of roles; collectives over the pool are therefore allowed there.
    """

    def __init__(self, role: str, config: Any, context: RankContext) -> None:
        self.role, self.config, self.context = role, config, context

    @classmethod
    def replicas(cls, role: str, config: Any, pool_size: int, kind: str) -> list[Replica]:
        """Replicas of a role in pool ranks. Needs nothing but the config, so that the loop can ask as well.

        "train": all ranks of one data-parallel index of the role's layout (tp fastest, then cp, dp, pp);
        "generate": consecutive groups of generation.tp ranks.

        Raises:
            ValueError: the degrees do not divide the pool's size.
        """
        if kind == "train":
            parallel = getattr(config, role).parallel
            try:
                layout = ParallelLayout.build(pool_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
            except ValueError as error:
                raise ValueError(f"{role}.parallel on a pool of {pool_size} ranks: {error}") from None
            last = layout.pp - 1
            return [
                Replica(ranks, entry=ranks[0], output=layout.rank_of(tp=0, pp=last, cp=0, dp=dp))
                for dp, ranks in enumerate(layout.groups("tp", "cp", "pp"))
            ]
        if kind == "generate":
            tp = config.generation.tp
            if tp < 1 or pool_size % tp:
                raise ValueError(
                    f"generation.tp({tp}) does not divide the pool's size({pool_size}) of role {role}; change one"
                )
            groups = [tuple(range(first, first + tp)) for first in range(0, pool_size, tp)]
            return [Replica(ranks, entry=ranks[0], output=ranks[0]) for ranks in groups]
        raise ValueError(f"replicas of kind {kind!r}: must be one of {KINDS}")

    @classmethod
    def row_cost(cls, role: str, config: Any) -> tuple[float, float]:
        """(linear, quadratic): what a row of L tokens costs in a method that splits over "train" replicas is
        linear * L + quadratic * L^2, in any unit. Like `replicas`, it needs nothing but the config and its files.
        """
        return TOKENS

    def replica(self, kind: str) -> Replica:
        """The replica that this rank belongs to."""
        for replica in self._replicas(kind):
            if self.context.rank in replica.ranks:
                return replica
        raise ValueError(f"rank {self.context.rank} of pool {self.context.pool} is in no {kind} replica of {self.role}")

    def replica_group(self, kind: str) -> Any:
        """torch process group of this rank's replica, or None for a replica of one rank.

        The first call for a partition creates its groups: every rank of the pool must make it at the same point (the
        transport does so right after the build). Roles with equal partitions share their groups.
        """
        partition = tuple(replica.ranks for replica in self._replicas(kind))
        groups = self.context._groups
        if partition not in groups:
            groups[partition] = _make_groups(partition, self.context.size, self.context.rank)
        return groups[partition]

    def phase(self, spec: MethodSpec) -> AbstractContextManager[None]:
        """Entered around every call of a declared method, on every rank."""
        return nullcontext()

    def close(self) -> None:
        """Free what must be freed before the process groups are destroyed. Called once at a clean end."""

    def _replicas(self, kind: str) -> list[Replica]:
        return type(self).replicas(self.role, self.config, self.context.size, kind)


def _make_groups(partition: tuple[tuple[int, ...], ...], size: int, rank: int) -> Any:
    """This rank's group of the partition. Collective over the pool's world."""
    mine = next((ranks for ranks in partition if rank in ranks), ())
    if all(len(ranks) == 1 for ranks in partition):
        return None
    import torch.distributed as dist  # not at the top: what the loop asks of a worker class needs no torch

    if len(partition) == 1 and len(mine) == size:
        return dist.group.WORLD
    made = [dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in partition]
    return made[partition.index(mine)]
