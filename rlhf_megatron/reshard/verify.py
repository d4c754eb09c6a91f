"""Prove that a target holds what the source holds, without gathering either.

A fingerprint is a sum over elements of a mix of the element's bits and its position in the canonical tensor, in
wrapping 64-bit integers. So it does not depend on how a tensor is cut, pieces add up, and two swapped elements are
seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.boxes import Index
from ..layouts.plan import ReshardPlan
from .execute import Execution, ReshardError, view

CHUNK = 1 << 16  # elements hashed at a time: temporaries of 512 KB stay in the cache
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# splitmix64's constants as signed 64-bit numbers
_STEP, _MIX1, _MIX2 = (value - (1 << 64) if value >= 1 << 63 else value
                       for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class WeightsDiffer(ReshardError):
    """Target weights are not those of the source; the message names the tensors."""


@torch.no_grad()
def fingerprint(tensor: Tensor, start: Index, shape: Index) -> int:
    """Fingerprint of a piece that begins at `start` of a canonical tensor of `shape`. Additive modulo 2**64 over
    pieces."""
    if tensor.numel() == 0:
        return 0
    strides = [prod(shape[axis + 1:]) for axis in range(len(shape))]
    rows = tensor.shape[0]

    def keys(axis: int, count: int) -> Tensor:
        """What positions along an axis add to the keys of their elements."""
        along = torch.arange(start[axis], start[axis] + count, dtype=torch.int64, device=tensor.device)
        return (along * strides[axis]).mul_(_STEP).view([-1 if i == axis else 1 for i in range(tensor.dim())])

    by_row, inner = keys(0, rows), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for axis in range(1, tensor.dim()):
        inner = inner + keys(axis, tensor.shape[axis])
    lines = max(1, CHUNK // max(1, prod(tensor.shape[1:])))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for low in range(0, rows, lines):
        part = tensor[low:low + lines].contiguous()
        total += _mix(part.view(_INTEGER[part.element_size()]).to(torch.int64, copy=True)
                      .add_(by_row[low:low + lines]).add_(inner)).sum()
    return int(total)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place; >> is arithmetic on int64, so the sign's copies are masked off."""
    shifted = torch.empty_like(x)
    for bits, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))
        if factor is not None:
            x.mul_(factor)
    return x


def compare(plan: ReshardPlan, source_tensors: Mapping[str, Tensor], target_tensors: Mapping[str, Tensor],
            group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None) -> list[str]:
    """Canonical names of the tensors whose bits differ on some target rank (the source converted to the target's
    dtype).

    Collective over `group`, like execute; every rank gets the same answer. dtype: the targets', needed only when no
    rank of the group holds target tensors.
    """
    run = Execution(plan, group)
    run.prepare(source_tensors, target_tensors, dtype)
    if len({tensor.dtype for tensor in target_tensors.values()}) > 1:
        raise ReshardError("target tensors have several dtypes; their bits can be compared only under one")
    alone, rank, dtype = run.alone, run.rank, run.dtype
    pieces = plan.distinct_pieces()
    number = {piece: i for i, piece in enumerate(pieces)}
    expected = torch.zeros(len(pieces), dtype=torch.int64)
    for piece, local, offset in plan.source_duties(rank):
        size = tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True))
        held = view(source_tensors[local], offset, size)
        expected[number[piece]] = fingerprint(held if dtype is None else held.to(dtype), piece.start,
                                              plan.shapes[piece.tensor])
    expected = expected.to(run.device)
    if not alone:
        dist.all_reduce(expected, group=group)
    wanted = expected.tolist()
    names = list(plan.shapes)
    differs = dict.fromkeys(names, 0)
    for piece, local, offset in plan.target_pieces(rank):
        size = tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True))
        found = fingerprint(view(target_tensors[local], offset, size), piece.start, plan.shapes[piece.tensor])
        if found != wanted[number[piece]]:
            differs[piece.tensor] = 1
    flags = torch.tensor([differs[name] for name in names], dtype=torch.int64, device=run.device)
    if not alone:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]


def require_equal(plan: ReshardPlan, source_tensors: Mapping[str, Tensor], target_tensors: Mapping[str, Tensor],
                  group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None) -> None:
    """compare, and WeightsDiffer on every rank when anything differs."""
    names = compare(plan, source_tensors, target_tensors, group, dtype)
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise WeightsDiffer(f"{len(names)} tensors differ after resharding: {', '.join(names[:8])}{more}")
