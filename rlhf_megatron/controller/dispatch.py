"""Which rows go to which replica, and how the results become one again. Pure functions.

Rows are balanced by what they cost, a polynomial of their tokens, and replicas get equal numbers of rows within one.
With fewer rows than replicas the idle replicas get a padding row each (a copy of the shortest row whose `response_mask`
is False everywhere), because every rank must take part in the method's collectives; what they return is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_megatron.data.balance import balance
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.observe import metrics
from rlhf_megatron.workers.base import TOKENS, MethodSpec


@dataclass(frozen=True)
class Split:
    """Parts of a batch, one per replica. `rows[i]`: which rows part i holds; () for a part of padding only."""

    parts: tuple[DataProto, ...]
    rows: tuple[tuple[int, ...], ...]


def token_counts(batch: DataProto) -> list[int]:
    """Tokens of each row: prompt plus response where the batch has them, else 1 per row."""
    known = [batch[name].lengths for name in ("prompts", "responses") if name in batch.tensors]
    if not known:
        return [1] * len(batch)
    return torch.stack([lengths.to("cpu", torch.int64) for lengths in known]).sum(0).tolist()


def split(batch: DataProto, replicas: int, row_cost: tuple[float, float] = TOKENS) -> Split:
    """Cut a batch into one part per replica.

    Args:
        row_cost: (linear, quadratic): a row of L tokens costs linear * L + quadratic * L^2, in any unit.

    Raises:
        ValueError: the batch has no rows.
    """
    if len(batch) == 0:
        raise ValueError("a batch of 0 rows cannot be split over replicas; check what the loop selected")
    linear, quadratic = row_cost
    rows = balance([linear * tokens + quadratic * tokens**2 for tokens in token_counts(batch)], replicas)
    padding = padding_row(batch) if not all(rows) else batch
    parts = tuple(batch.reorder(part) if part else padding for part in rows)
    return Split(parts, tuple(tuple(part) for part in rows))


def padding_row(batch: DataProto) -> DataProto:
    """One row that counts for nothing in a loss: the shortest row, with no valid response token."""
    counts = token_counts(batch)
    row = batch.reorder([counts.index(min(counts))])
    if "response_mask" not in row.tensors:
        return row
    mask = row["response_mask"]
    ragged = isinstance(mask, Ragged)
    nothing = Ragged(torch.zeros_like(mask.values), mask.lengths) if ragged else torch.zeros_like(mask)
    return DataProto(tensors={**row.tensors, "response_mask": nothing}, non_tensors=row.non_tensors, meta=row.meta)


def merge(results: Sequence[Any], parts: Split, spec: MethodSpec, stage: str) -> Any:
    """One result from the replicas' results: rows back in batch order, metrics merged.

    Args:
        results: per replica None, a DataProto, a dict of metrics, or (DataProto, dict).
        stage: "role.method", for messages.

    Raises:
        TypeError: replicas returned different kinds of results, or something else.
        ValueError: a replica returned another number of rows than it got, or lacks a declared field.
    """
    kept = [(result, rows) for result, rows in zip(results, parts.rows, strict=True) if rows]
    pieces = [_pieces(result, stage) for result, _ in kept]
    if len({tuple(piece is None for piece in both) for both in pieces}) > 1:
        kinds = [type(result).__name__ for result, _ in kept]
        raise TypeError(f"{stage}: the replicas' output ranks returned different kinds of results: {kinds}")
    batches, reports = [b for b, _ in pieces if b is not None], [r for _, r in pieces if r is not None]
    merged_rows = _restore(batches, [rows for _, rows in kept], spec, stage) if batches else None
    merged_report = metrics.merge(reports) if reports else None
    if merged_rows is None or merged_report is None:
        return merged_rows if merged_report is None else merged_report
    return merged_rows, merged_report


def _pieces(result: Any, stage: str) -> tuple[DataProto | None, dict | None]:
    pair = result if isinstance(result, tuple) and len(result) == 2 else (
        (None, result) if isinstance(result, dict) else (result, None))
    rows, report = pair
    if not isinstance(rows, (DataProto, type(None))) or not isinstance(report, (dict, type(None))):
        raise TypeError(f"{stage} returned {type(result).__name__}: a method that splits rows returns a DataProto, a "
                        "dict of metrics, (DataProto, dict), or None")
    return rows, report


def _restore(batches: list[DataProto], rows: list[tuple[int, ...]], spec: MethodSpec, stage: str) -> DataProto:
    order: list[int] = []
    selected = []
    for batch, part in zip(batches, rows, strict=True):
        missing = [name for name in spec.returns if name not in batch.tensors and name not in batch.non_tensors]
        if missing:
            have = sorted([*batch.tensors, *batch.non_tensors])
            raise ValueError(f"{stage} declares that it returns {missing[0]!r} but returned only {have}")
        if len(batch) != len(part):
            raise ValueError(f"{stage} got {len(part)} rows and returned {len(batch)}: one row out per row in, in "
                             "the same order")
        # The meta of a result stays behind: the loop's batch keeps its own.
        tensors = {name: batch.tensors[name] for name in spec.returns if name in batch.tensors}
        others = {name: batch.non_tensors[name] for name in spec.returns if name in batch.non_tensors}
        selected.append(DataProto(tensors=tensors, non_tensors=others, meta={}))
        order += part
    back = [0] * len(order)
    for position, row in enumerate(order):
        back[row] = position
    whole = selected[0] if len(selected) == 1 else DataProto.concat(selected)
    return whole if back == list(range(len(back))) else whole.reorder(back)
