"""Boxes of canonical tensors, where ranks keep them, and the interface every layout offers. Torch-free.

A canonical tensor is named and shaped as in the published safetensors files. A box is a hyper-rectangle of one; a
placement says where a rank keeps a box. Whatever holds weights (files, Megatron ranks, an engine) is a `Layout`: a
set of placements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import NamedTuple

Index = tuple[int, ...]


class Box(NamedTuple):
    """The elements [start, stop) of the canonical tensor `tensor`."""

    tensor: str
    start: Index
    stop: Index

    @property
    def size(self) -> Index:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.size)

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class Placement(NamedTuple):
    """`box` lies in the local tensor `local` at [offset, offset + box.size), same orientation.

    A derived placement is recomputed by its holder from other weights, so a plan neither reads nor writes it.
    """

    box: Box
    local: str
    offset: Index
    derived: bool = False


def intersect(start: Index, stop: Index, other_start: Index, other_stop: Index) -> tuple[Index, Index] | None:
    """The common region of two regions of one tensor, or None."""
    low = tuple(map(max, start, other_start))
    high = tuple(map(min, stop, other_stop))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def subtract(start: Index, stop: Index, hole_start: Index, hole_stop: Index) -> list[tuple[Index, Index]]:
    """Disjoint regions that make up [start, stop) without the hole, which must lie inside."""
    rest, low, high = [], list(start), list(stop)
    for axis in range(len(start)):
        if low[axis] < hole_start[axis]:
            rest.append((tuple(low), (*high[:axis], hole_start[axis], *high[axis + 1:])))
        if hole_stop[axis] < high[axis]:
            rest.append(((*low[:axis], hole_stop[axis], *low[axis + 1:]), tuple(high)))
        low[axis], high[axis] = hole_start[axis], hole_stop[axis]
    return rest


def is_contiguous(size: Index, shape: Index) -> bool:
    """Whether a region of `size` inside a contiguous tensor of `shape` is one run of memory."""
    axis = 0
    while axis < len(size) and size[axis] == 1:
        axis += 1
    return size[axis + 1:] == shape[axis + 1:]


class Layout(ABC):
    """Which boxes each rank holds, and where. Implementations cache: ranks that hold the same return the same tuple."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]: ...

    @abstractmethod
    def canonical_shapes(self) -> dict[str, Index]:
        """Shape of every canonical tensor, in file order."""

    @abstractmethod
    def placements(self, rank: int) -> tuple[Placement, ...]: ...

    @abstractmethod
    def local_shapes(self, rank: int) -> dict[str, Index]:
        """Shape of every local tensor of the rank."""

    def padding(self, rank: int) -> dict[str, int]:
        """Local tensors that hold elements without a box (padded vocabulary rows) -> how many elements."""
        return {}

    def classes(self) -> list[tuple[tuple[Placement, ...], tuple[int, ...]]]:
        """Ranks grouped by equal placements, in the order of their first rank: [(placements, ranks), ...]."""
        found: dict[int, tuple[tuple[Placement, ...], list[int]]] = {}
        for rank in self.ranks:
            placements = self.placements(rank)
            found.setdefault(id(placements), (placements, []))[1].append(rank)
        return [(placements, tuple(ranks)) for placements, ranks in found.values()]

    def check(self, rank: int) -> list[str]:
        """What is wrong with the rank's placements: outside a tensor, two on one element, elements without a box."""
        shapes, canonical, found = self.local_shapes(rank), self.canonical_shapes(), []
        by_local: dict[str, list[Placement]] = {name: [] for name in shapes}
        for place in self.placements(rank):
            whole, shape = canonical.get(place.box.tensor), shapes.get(place.local)
            end = tuple(o + s for o, s in zip(place.offset, place.box.size, strict=False))
            if whole is None:
                found.append(f"{place.local}: unknown canonical tensor {place.box.tensor}")
            elif shape is None:
                found.append(f"{place.box}: placed in {place.local}, which rank {rank} does not have")
            elif not (len(place.box.start) == len(whole) == len(shape) == len(place.offset)
                      and min(place.box.start, default=0) >= 0 and min(place.offset, default=0) >= 0
                      and all(a < b <= n for a, b, n in zip(place.box.start, place.box.stop, whole, strict=True))
                      and all(e <= n for e, n in zip(end, shape, strict=True))):
                found.append(f"{place.local}: {place.box} at {place.offset} does not fit {shape} (canonical {whole})")
            else:
                by_local[place.local].append(place)
        if found:
            return found
        padding = self.padding(rank)
        for local, places in by_local.items():
            regions = [(p.offset, tuple(o + s for o, s in zip(p.offset, p.box.size, strict=True))) for p in places]
            covered = sum(p.box.elements for p in places)
            wanted = prod(shapes[local]) - padding.get(local, 0)
            if len(regions) > 1 and _overlap(regions):
                found.append(f"{local}: some elements are placed twice (doubled)")
            elif covered != wanted:
                found.append(f"{local}: {covered} of {wanted} elements have a box ({wanted - covered} missing)")
        return found


def _overlap(regions: list[tuple[Index, Index]]) -> bool:
    """Sweep along the first axis; regions of one tensor are few on each line, so this stays near linear."""
    regions = sorted(regions)
    active: list[tuple[Index, Index]] = []
    for start, stop in regions:
        active = [region for region in active if region[1][0] > start[0]]
        if any(intersect(start, stop, *other) for other in active):
            return True
        active.append((start, stop))
    return False
