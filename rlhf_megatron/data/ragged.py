"""Rows of different lengths in one flat tensor. All row operations are index arithmetic on the flat values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class BatchError(ValueError):
    """A batch operation was asked for something that does not fit; the message names the field and the numbers."""


class Ragged:
    """B rows of tokens: `values` [sum of lengths, ...] and `lengths` [B] int64.

    Treated as immutable: operations return new objects, which may share storage with the old ones.

    Raises:
        BatchError: lengths are not a vector of non-negative integers that sum to the number of values.
    """

    __slots__ = ("values", "lengths", "_offsets")

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if lengths.dim() != 1 or values.dim() < 1:
            raise BatchError(f"ragged: lengths must be [B] and values [N, ...], not {tuple(lengths.shape)} and "
                             f"{tuple(values.shape)}")
        if len(lengths) and int(lengths.min()) < 0:
            raise BatchError(f"ragged: length {int(lengths.min())} is negative")
        if int(lengths.sum()) != values.shape[0]:
            raise BatchError(f"ragged: lengths sum to {int(lengths.sum())}, but there are {values.shape[0]} values")
        self.values, self.lengths = values, lengths
        self._offsets: torch.Tensor | None = None

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """From a list of number lists or 1-D tensors; int64 unless `dtype` is given or a float or bool is found."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if rows and all(isinstance(row, torch.Tensor) for row in rows):
            values = torch.cat(list(rows))
            return cls(values if dtype is None else values.to(dtype), lengths)
        flat = [value for row in rows for value in row]
        if dtype is None and not flat:
            dtype = torch.int64
        return cls(torch.tensor(flat, dtype=dtype), lengths)

    @classmethod
    def from_padded(cls, padded: torch.Tensor, mask: torch.Tensor) -> Ragged:
        """From [B, T, ...] and a bool mask [B, T] of the positions to keep; what stands under the mask is dropped."""
        mask = mask.bool()
        return cls(padded[mask], mask.sum(1))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> torch.Tensor:
        """One row [length, ...] as a view."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[int(self.offsets[row]): int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, values={tuple(self.values.shape)}, dtype={self.values.dtype})"

    @property
    def offsets(self) -> torch.Tensor:
        """[B + 1]: where each row starts; the last is the number of values."""
        if self._offsets is None:
            zero = self.lengths.new_zeros(1)
            self._offsets = torch.cat([zero, self.lengths.cumsum(0)])
        return self._offsets

    def to_list(self) -> list[list[Any]]:
        """Plain Python lists, one a row."""
        flat, offsets = self.values.tolist(), self.offsets.tolist()
        return [flat[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]

    def mask(self, to: int | None = None, side: str = "right") -> torch.Tensor:
        """[B, T] bool: True on valid tokens. T is the longest row, or `to`; padding stands on `side`."""
        width = self._width(to)
        column = torch.arange(width, device=self.lengths.device)
        if side == "right":
            return column < self.lengths[:, None]
        if side == "left":
            return column >= width - self.lengths[:, None]
        raise BatchError(f"ragged: padding side {side!r} is neither 'right' nor 'left'")

    def pad(self, value: float | int | bool = 0, to: int | None = None, side: str = "right") -> torch.Tensor:
        """[B, T, ...] with `value` where no token is. T is the longest row, or `to` (BatchError if a row is longer)."""
        mask = self.mask(to, side)
        out = self.values.new_full((*mask.shape, *self.values.shape[1:]), value)
        for _ in self.values.shape[1:]:
            mask = mask.unsqueeze(-1)
        return out.masked_scatter_(mask, self.values)

    def row_ids(self) -> torch.Tensor:
        """[N]: the row of every value."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    def gather_index(self, index: torch.Tensor) -> torch.Tensor:
        """Flat positions of the values of rows `index` [M], in that order."""
        lengths = self.lengths[index]
        ends = lengths.cumsum(0)
        shift = self.offsets[:-1][index] - (ends - lengths)
        total = int(ends[-1]) if len(ends) else 0
        return torch.arange(total, device=lengths.device) + torch.repeat_interleave(shift, lengths, output_size=total)

    def reorder(self, index: torch.Tensor, flat: torch.Tensor | None = None) -> Ragged:
        """Rows `index` [M] (repeats allowed). `flat`: `gather_index(index)`, when a caller has it already."""
        flat = self.gather_index(index) if flat is None else flat
        return Ragged(self.values.index_select(0, flat), self.lengths[index])

    def split(self, sizes: Sequence[int]) -> list[Ragged]:
        """Consecutive pieces of `sizes` rows, as views."""
        bounds = torch.tensor([0, *sizes], dtype=torch.int64, device=self.lengths.device).cumsum(0)
        counts = self.offsets[bounds].diff().tolist()
        pieces = zip(self.values.split(counts), self.lengths.split(list(sizes)), strict=True)
        return [Ragged(values, lengths) for values, lengths in pieces]

    @staticmethod
    def concat(pieces: Sequence[Ragged]) -> Ragged:
        """All rows of `pieces`, in order."""
        return Ragged(torch.cat([p.values for p in pieces]), torch.cat([p.lengths for p in pieces]))

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """The values as by Tensor.to; the lengths follow to the same device and stay int64."""
        values = self.values.to(*args, **kwargs)
        return Ragged(values, self.lengths.to(values.device))

    def equal(self, other: Ragged) -> bool:
        """Same lengths, dtype and values; NaN equals NaN."""
        return torch.equal(self.lengths, other.lengths) and same_values(self.values, other.values)

    def _width(self, to: int | None) -> int:
        longest = int(self.lengths.max()) if len(self) else 0
        if to is not None and to < longest:
            raise BatchError(f"ragged: a row has {longest} tokens, which does not fit into a width of {to}")
        return longest if to is None else to


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and values; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(((a == b) | ((a != a) & (b != b))).all())
