"""Intersect two layouts: who sends which elements to whom, what stays on its rank, in which rounds. Pure Python.

A plan is checked when it is made (every element of the target exactly once) and worked out rank by rank when asked,
so that a cluster of thousands costs each rank only its own share. Every rank derives the same messages in the same
order: a sender and a receiver never talk about a plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from .boxes import Box, Index, Layout, Placement, intersect, subtract

ROUND_BYTES = 64 << 20


class PlanError(ValueError):
    """The two layouts do not describe the same model, or one of them does not hold every element once."""


class Piece(NamedTuple):
    """A region of one local tensor, to be sent or received: local[offset : offset + size]."""

    tensor: str
    local: str
    offset: Index
    size: Index
    elements: int


class Copy(NamedTuple):
    """A region that is already on the rank: target[target_offset:...] = source[source_offset:...]."""

    tensor: str
    source: str
    source_offset: Index
    target: str
    target_offset: Index
    size: Index
    elements: int


class Round(NamedTuple):
    """What a rank does in one round. Pieces for one peer are in the order in which both sides pack them."""

    sends: dict[int, list[Piece]]
    receives: dict[int, list[Piece]]
    copies: list[Copy]


class RankPlan(NamedTuple):
    rank: int
    rounds: list[Round]

    @property
    def elements_sent(self) -> int:
        return sum(piece.elements for r in self.rounds for pieces in r.sends.values() for piece in pieces)

    @property
    def elements_received(self) -> int:
        return sum(piece.elements for r in self.rounds for pieces in r.receives.values() for piece in pieces)


class Owners(NamedTuple):
    """Ranks that hold (or lack) one region, in a fixed order, for the choice among replicas."""

    ranks: tuple[int, ...]
    position: dict[int, int]


class _Regions(NamedTuple):
    """The distinct regions of one tensor that the source's ranks hold."""

    regions: tuple[tuple[Index, Index], ...]
    classes: list[tuple[int, ...]]            # per region: source classes that hold it
    places: list[dict[int, Placement]]        # per region: source class -> where
    disjoint: bool


def make_plan(source: Layout, target: Layout, itemsize: int = 4, round_bytes: int = ROUND_BYTES,
              interleave: bool = True) -> ReshardPlan:
    """Plan from `source` to `target`. itemsize: bytes per element on the wire (the target's dtype).

    round_bytes bounds what one rank receives in one round (a single row of a tensor is never cut). interleave:
    order tensors so that each round draws on every pipeline stage; False keeps the canonical order (for streaming
    to files). PlanError names missing, extra, misshapen and doubled tensors.
    """
    return ReshardPlan(source, target, itemsize, round_bytes, interleave)


class ReshardPlan:
    """See make_plan. `for_rank(rank)` -> RankPlan; `bytes_moved`, `bytes_permuted`, `bytes_shared` over all ranks;
    str()."""

    def __init__(self, source: Layout, target: Layout, itemsize: int, round_bytes: int, interleave: bool) -> None:
        if round_bytes < 1 or itemsize < 1:
            raise ValueError(f"round_bytes({round_bytes}) and itemsize({itemsize}) must be at least 1")
        self.source, self.target, self.itemsize, self.round_bytes = source, target, itemsize, round_bytes
        self.shapes = target.canonical_shapes()
        _check_layouts(source, target)
        self._source_classes, self._target_classes = source.classes(), target.classes()
        self._source_class = _class_of(self._source_classes)
        self._target_class = _class_of(self._target_classes)
        self._wanted = [_by_tensor(placements) for placements, _ in self._target_classes]
        self._index = self._index_source()
        self._owners_cache: dict[tuple[int, ...], Owners] = {}
        self._lacking_cache: dict[tuple[int, tuple[int, ...]], Owners] = {}
        self._rank_plans: dict[int, RankPlan] = {}
        self._check_coverage()
        self.tensors = self._order(interleave)
        self._ordinal = {tensor: i for i, tensor in enumerate(self.tensors)}
        self._units, self.num_rounds = self._cut_rounds()

    # --- what a rank does ---------------------------------------------------------------------------------------------

    def for_rank(self, rank: int) -> RankPlan:
        """The rank's rounds (all empty for a rank outside both layouts). Cached."""
        if rank not in self._rank_plans:
            rounds = [Round({}, {}, []) for _ in range(self.num_rounds)]
            self._plan_receives(rank, rounds)
            self._plan_sends(rank, rounds)
            self._rank_plans[rank] = RankPlan(rank, rounds)
        return self._rank_plans[rank]

    def round_tensors(self, index: int) -> list[tuple[str, bool]]:
        """Canonical tensors with elements in round `index`, and whether this round is their last."""
        return [(tensor, units[-1][0] == index) for tensor, units in self._units.items()
                if any(unit[0] == index for unit in units)]

    def target_pieces(self, rank: int) -> Iterator[tuple[Box, str, Index]]:
        """(box, target's local tensor, offset there) of everything the rank receives or copies; for verification.

        The boxes are cut the same for every rank, whichever holder a rank takes them from.
        """
        if rank in self._target_class:
            for tensor, places in self._wanted[self._target_class[rank]].items():
                for place in places:
                    for _, start, stop, _ in self._pieces(tensor, place, ()):
                        yield Box(tensor, start, stop), place.local, _inside(place, start)

    def distinct_pieces(self) -> dict[Box, int]:
        """Every box that some rank's target_pieces names, and the source region that it lies in."""
        found: dict[Box, int] = {}
        for wanted in self._wanted:
            for tensor, places in wanted.items():
                for place in places:
                    for _, start, stop, region in self._pieces(tensor, place, ()):
                        found[Box(tensor, start, stop)] = region
        return found

    def source_duties(self, rank: int) -> Iterator[tuple[Box, str, Index]]:
        """(box, source's local tensor, offset there) for the rank's share of the distinct pieces: each is one
        rank's."""
        if rank in self._source_class:
            mine = self._source_class[rank]
            for box, region in self.distinct_pieces().items():
                source = self._index[box.tensor]
                owners = self._owners(source.classes[region]).ranks
                if owners[self._ordinal[box.tensor] % len(owners)] == rank:
                    place = source.places[region][mine]
                    yield box, place.local, _inside(place, box.start)

    def _plan_receives(self, rank: int, rounds: list[Round]) -> None:
        if rank not in self._target_class:
            return
        number = self._target_class[rank]
        mine = self._source_class.get(rank)
        for tensor in self.tensors:
            source, ordinal = self._index[tensor], self._ordinal[tensor]
            for place in self._wanted[number].get(tensor, ()):
                for index, start, stop, region in self._pieces(tensor, place, self._own(tensor, mine)):
                    size = tuple(b - a for a, b in zip(start, stop, strict=True))
                    offset = _inside(place, start)
                    here = None if mine is None else source.places[region].get(mine)
                    if here is not None:
                        rounds[index].copies.append(Copy(tensor, here.local, _inside(here, start), place.local, offset,
                                                         size, prod(size)))
                        continue
                    owners = self._owners(source.classes[region]).ranks
                    turn = self._lacking(number, source.classes[region]).position[rank]
                    peer = owners[(turn + ordinal) % len(owners)]  # spreads the receivers evenly over the replicas
                    rounds[index].receives.setdefault(peer, []).append(
                        Piece(tensor, place.local, offset, size, prod(size)))

    def _plan_sends(self, rank: int, rounds: list[Round]) -> None:
        if rank not in self._source_class:
            return
        mine = self._source_class[rank]
        for tensor in self.tensors:
            source, ordinal = self._index[tensor], self._ordinal[tensor]
            held = {i: places[mine] for i, places in enumerate(source.places) if mine in places}
            if not held:
                continue
            for number, (_, receivers) in enumerate(self._target_classes):
                for place in self._wanted[number].get(tensor, ()):
                    for index, start, stop, region, only in self._demands(tensor, place, receivers):
                        if region not in held:
                            continue
                        owners = self._owners(source.classes[region])
                        count = len(owners.ranks)
                        # the receivers whose choice falls on this rank: every count-th of those that lack the region
                        first = (owners.position[rank] - ordinal) % count
                        for peer in self._lacking(number, source.classes[region]).ranks[first::count]:
                            if only is not None and peer != only:
                                continue
                            size = tuple(b - a for a, b in zip(start, stop, strict=True))
                            rounds[index].sends.setdefault(peer, []).append(
                                Piece(tensor, held[region].local, _inside(held[region], start), size, prod(size)))

    def _demands(self, tensor: str, place: Placement, receivers: tuple[int, ...]
                 ) -> Iterator[tuple[int, Index, Index, int, int | None]]:
        """Pieces of a placement and which receiver takes them so; None = all of them."""
        if self._index[tensor].disjoint:
            for piece in self._pieces(tensor, place, ()):
                yield *piece, None
            return
        # overlapping holders: what a receiver lacks depends on what it holds, so work it out for each
        for receiver in receivers:
            for piece in self._pieces(tensor, place, self._own(tensor, self._source_class.get(receiver))):
                yield *piece, receiver

    def _pieces(self, tensor: str, place: Placement, own: tuple[int, ...]) -> Iterator[tuple[int, Index, Index, int]]:
        """(round, start, stop, source region) of a target placement, in canonical coordinates."""
        box, regions = place.box, self._index[tensor].regions
        for index, low, high in self._units[tensor]:
            start, stop = (max(box.start[0], low), *box.start[1:]), (min(box.stop[0], high), *box.stop[1:])
            if start[0] < stop[0]:
                for piece in _cover(start, stop, regions, own)[0]:
                    yield index, *piece

    def _own(self, tensor: str, source_class: int | None) -> tuple[int, ...]:
        """Regions to take first because they are on the rank; not needed where no two regions overlap."""
        source = self._index[tensor]
        if source.disjoint or source_class is None:
            return ()
        return tuple(i for i, places in enumerate(source.places) if source_class in places)

    def _owners(self, classes: tuple[int, ...]) -> Owners:
        if classes not in self._owners_cache:
            ranks = tuple(rank for number in classes for rank in self._source_classes[number][1])
            self._owners_cache[classes] = Owners(ranks, {rank: i for i, rank in enumerate(ranks)})
        return self._owners_cache[classes]

    def _lacking(self, number: int, classes: tuple[int, ...]) -> Owners:
        """The ranks of a target class that do not hold a region which the given source classes hold."""
        if (number, classes) not in self._lacking_cache:
            position = self._owners(classes).position
            ranks = tuple(rank for rank in self._target_classes[number][1] if rank not in position)
            self._lacking_cache[number, classes] = Owners(ranks, {rank: i for i, rank in enumerate(ranks)})
        return self._lacking_cache[number, classes]

    # --- making it ----------------------------------------------------------------------------------------------------

    def _index_source(self) -> dict[str, _Regions]:
        found: dict[str, dict[tuple[Index, Index], dict[int, Placement]]] = {tensor: {} for tensor in self.shapes}
        for number, (placements, ranks) in enumerate(self._source_classes):
            for place in placements:
                if place.derived:
                    continue
                holders = found[place.box.tensor].setdefault((place.box.start, place.box.stop), {})
                if number in holders:
                    raise PlanError(f"rank {ranks[0]} of the source holds {place.box} twice (doubled): as "
                                    f"{holders[number].local} and as {place.local}")
                holders[number] = place
        return {tensor: _Regions(tuple(regions), [tuple(h) for h in regions.values()], list(regions.values()),
                                 _disjoint(tuple(regions)))
                for tensor, regions in found.items()}

    def _check_coverage(self) -> None:
        missing: list[str] = []
        wanted: set[str] = set()
        for number, (placements, ranks) in enumerate(self._target_classes):
            wanted.update(self._wanted[number])
            for place in placements:
                if place.derived:
                    continue
                rest = _cover(place.box.start, place.box.stop, self._index[place.box.tensor].regions, ())[1]
                missing += [f"{Box(place.box.tensor, *region)} (wanted by rank {ranks[0]})" for region in rest]
        unplaced = [tensor for tensor in self.shapes if tensor not in wanted]
        if missing:
            raise PlanError(f"no rank of the source holds (missing): {_listed(missing)}")
        if unplaced:
            raise PlanError(f"no rank of the target places (missing): {_listed(unplaced)}")

    def _order(self, interleave: bool) -> list[str]:
        if not interleave:
            return list(self.shapes)
        turn: dict[tuple, int] = {}
        keys = {}
        for tensor in self.shapes:
            source = self._index[tensor]
            key = (frozenset(n for classes in source.classes for n in classes),
                   tuple(tensor in wanted for wanted in self._wanted))
            keys[tensor] = turn[key] = turn.get(key, -1) + 1
        return sorted(self.shapes, key=keys.__getitem__)  # stable: the n-th tensor of each stage, then the next

    def _cut_rounds(self) -> tuple[dict[str, list[tuple[int, int, int]]], int]:
        """Per tensor its units [(round, first row, end row), ...], and the number of rounds."""
        units: dict[str, list[tuple[int, int, int]]] = {}
        index, filled = 0, 0
        for tensor in self.tensors:
            rows = self.shapes[tensor][0]
            held = max(sum(p.box.elements for p in wanted.get(tensor, ())) for wanted in self._wanted) * self.itemsize
            per_unit = max(1, rows * self.round_bytes // max(held, 1))
            units[tensor] = []
            for low in range(0, rows, per_unit):
                high = min(low + per_unit, rows)
                size = held * (high - low) // rows
                if filled and filled + size > self.round_bytes:
                    index, filled = index + 1, 0
                filled += size
                units[tensor].append((index, low, high))
        return units, index + 1

    # --- figures ------------------------------------------------------------------------------------------------------

    @cached_property
    def _totals(self) -> dict[str, int]:
        """Elements moved, shared, permuted over all ranks, and received by the rank that receives most."""
        moved = shared = permuted = most = 0
        pairs: dict[tuple[int | None, int], list[int]] = {}
        for rank, number in self._target_class.items():
            pairs.setdefault((self._source_class.get(rank), number), []).append(rank)
        for (_, number), ranks in pairs.items():  # ranks with the same source and target share look alike
            held = sum(p.box.elements for places in self._wanted[number].values() for p in places)
            own, same = self._local(ranks[0])
            moved += (held - own) * len(ranks)
            shared += same * len(ranks)
            permuted += (own - same) * len(ranks)
            most = max(most, held - own)
        return {"moved": moved, "shared": shared, "permuted": permuted, "most": most}

    def _local(self, rank: int) -> tuple[int, int]:
        """Elements that stay on the rank: (all, those whose target tensor is byte for byte a source tensor)."""
        mine = self._source_class.get(rank)
        if mine is None:
            return 0, 0
        source_shapes, target_shapes = self.source.local_shapes(rank), self.target.local_shapes(rank)
        own = 0
        aligned: dict[tuple[str, str], int] = {}
        for tensor, places in self._wanted[self._target_class[rank]].items():
            source = self._index[tensor]
            for place in places:
                for _, start, stop, region in self._pieces(tensor, place, self._own(tensor, mine)):
                    here = source.places[region].get(mine)
                    if here is None:
                        continue
                    elements = prod(b - a for a, b in zip(start, stop, strict=True))
                    own += elements
                    if _inside(place, start) == _inside(here, start):
                        key = (place.local, here.local)
                        aligned[key] = aligned.get(key, 0) + elements
        same = sum(count for (to, of), count in aligned.items()
                   if source_shapes[of] == target_shapes[to] and count == prod(target_shapes[to]))
        return own, same

    @property
    def bytes_moved(self) -> int:
        """Bytes received from other ranks, over all ranks."""
        return self._totals["moved"] * self.itemsize

    @property
    def bytes_permuted(self) -> int:
        """Bytes copied on their own rank, over all ranks."""
        return self._totals["permuted"] * self.itemsize

    @property
    def bytes_shared(self) -> int:
        """Bytes on their own rank already in the target's form (storage can be shared), over all ranks."""
        return self._totals["shared"] * self.itemsize

    @property
    def fingerprint(self) -> int:
        """A number that differs between different plans; ranks compare it before they talk."""
        told = (self.source.ranks, self.target.ranks, self._units, self.itemsize, sorted(self._totals.items()))
        return zlib.crc32(repr(told).encode())

    def describe(self) -> str:
        elements = sum(prod(shape) for shape in self.shapes.values())
        mean = self.bytes_moved / max(len(self.target.ranks), 1)
        return "\n".join((
            f"{self.source} -> {self.target}",
            f"  {len(self.shapes)} tensors, {elements:,} elements, {_mb(elements * self.itemsize)} at "
            f"{self.itemsize} bytes each",
            f"  moved {_mb(self.bytes_moved)}, permuted in place {_mb(self.bytes_permuted)}, "
            f"shared {_mb(self.bytes_shared)} (all ranks)",
            f"  received per rank: mean {_mb(mean)}, most {_mb(self._totals['most'] * self.itemsize)}",
            f"  {self.num_rounds} rounds of at most {_mb(self.round_bytes)} received per rank"))

    __str__ = describe


@lru_cache(maxsize=65536)
def _cover(start: Index, stop: Index, regions: tuple[tuple[Index, Index], ...], own: tuple[int, ...]
           ) -> tuple[tuple[tuple[Index, Index, int], ...], tuple[tuple[Index, Index], ...]]:
    """Tile [start, stop) from `regions`, those in `own` first: (((start, stop, region), ...), what no region holds).

    Tensors of one shape and cut share the work: a model has a dozen of these, however many layers.
    """
    pieces, rest = [], [(start, stop)]
    for number in (*own, *(i for i in range(len(regions)) if i not in own)):
        if not rest:
            break
        left = []
        for part in rest:
            common = intersect(*part, *regions[number])
            if common is None:
                left.append(part)
            else:
                pieces.append((*common, number))
                left += subtract(*part, *common)
        rest = left
    return tuple(pieces), tuple(rest)


@lru_cache(maxsize=4096)
def _disjoint(regions: tuple[tuple[Index, Index], ...]) -> bool:
    return not any(intersect(*a, *b) for i, a in enumerate(regions) for b in regions[:i])


def _inside(place: Placement, start: Index) -> Index:
    """Where canonical position `start` lies in the placement's local tensor."""
    return tuple(o + a - b for o, a, b in zip(place.offset, start, place.box.start, strict=True))


def _class_of(classes: list[tuple[tuple[Placement, ...], tuple[int, ...]]]) -> dict[int, int]:
    return {rank: number for number, (_, ranks) in enumerate(classes) for rank in ranks}


def _by_tensor(placements: Iterable[Placement]) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = {}
    for place in placements:
        if not place.derived:
            found.setdefault(place.box.tensor, []).append(place)
    return found


def _check_layouts(source: Layout, target: Layout) -> None:
    """The same canonical tensors on both sides, and each side sound in itself."""
    have, want = source.canonical_shapes(), target.canonical_shapes()
    found = []
    for title, names in (("missing in the source", want.keys() - have.keys()),
                         ("extra in the source", have.keys() - want.keys()),
                         ("of another shape", {n for n in want.keys() & have.keys() if want[n] != have[n]})):
        if names:
            found.append(f"{title}: {_listed(sorted(names))}")
    for side, layout in (("source", source), ("target", target)):
        for _, ranks in layout.classes():
            found += [f"{side}, rank {ranks[0]}: {text}" for text in layout.check(ranks[0])[:5]]
    if found:
        raise PlanError("the layouts do not fit: " + "; ".join(found))


def _listed(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
