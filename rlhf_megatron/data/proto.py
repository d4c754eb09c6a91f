"""DataProto: the batch that the loop and the workers pass on.

Token fields are `Ragged` (values + lengths): what is stored, sent and saved has no padding. A padded [B, T] view is
made where tensor code wants one. Per-row Python data (ids, finish reasons, data-set rows) stands in `non_tensors`, what
belongs to the whole batch in `meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.data.ragged import BatchError, Ragged, same_values

__all__ = ["BatchError", "DataProto", "Field", "MissingField", "Ragged"]

Field = torch.Tensor | Ragged | list
_MISSING = object()


class MissingField(BatchError, KeyError):
    """A stage needs a field that the batch does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class DataProto:
    """B rows of named fields.

    Args:
        tensors: name -> Ragged of B rows, or a dense tensor [B, ...].
        non_tensors: name -> list of B JSON-like values.
        meta: anything about the batch as a whole (JSON-like if the batch is to be saved).

    Operations return new batches (which may share storage), except `pop`, which takes fields out of this one.
    A batch without any field has 0 rows and is neutral in `union` and `concat`.

    Raises:
        BatchError: the fields disagree about the number of rows, or have a wrong type.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | Ragged] | None = None,
        non_tensors: Mapping[str, list] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors: dict[str, torch.Tensor | Ragged] = dict(tensors or {})
        self.non_tensors: dict[str, list] = dict(non_tensors or {})
        self.meta: dict[str, Any] = dict(meta or {})
        for name, value in self.tensors.items():
            if not isinstance(value, (Ragged, torch.Tensor)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
                raise BatchError(f"field {name!r} must be Ragged or a tensor [B, ...], not {type(value).__name__}")
        for name, items in self.non_tensors.items():
            if not isinstance(items, list):
                raise BatchError(f"field {name!r} must be a list with one item a row, not {type(items).__name__}")
        if both := self.tensors.keys() & self.non_tensors.keys():
            raise BatchError(f"fields {sorted(both)} are given as tensors and as non-tensors")
        sizes = {name: len(value) for name, value in self.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"fields disagree about the number of rows: {sizes}")
        self._rows = next(iter(sizes.values()), 0)

    # ---- looking ----

    def __len__(self) -> int:
        return self._rows if self.tensors or self.non_tensors else 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.non_tensors

    def __getitem__(self, name: str) -> Any:
        found = self.get(name, _MISSING)
        if found is _MISSING:
            raise MissingField(f"no field {name!r} in the batch; it has {self.names()}")
        return found

    def __repr__(self) -> str:
        return f"DataProto(rows={len(self)}, fields={self.names()}, meta={sorted(self.meta)})"

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default`."""
        return self.tensors[name] if name in self.tensors else self.non_tensors.get(name, default)

    def names(self) -> list[str]:
        """Names of all fields, tensors first."""
        return [*self.tensors, *self.non_tensors]

    def items(self) -> Iterator[tuple[str, Field]]:
        """(name, field) of all fields, tensors first."""
        yield from self.tensors.items()
        yield from self.non_tensors.items()

    def require(self, names: Iterable[str], stage: str) -> DataProto:
        """This batch, if it has every field of `names`; MissingField names the stage and what is missing otherwise."""
        if missing := [name for name in names if name not in self]:
            raise MissingField(f"{stage} needs field(s) {missing}, which no earlier stage has put into the batch; "
                               f"it has {self.names()}")
        return self

    # ---- fields ----

    def select(self, names: Iterable[str]) -> DataProto:
        """Only the fields `names`; meta stays."""
        wanted = list(names)
        self.require(wanted, "select")
        return DataProto({n: self.tensors[n] for n in wanted if n in self.tensors},
                         {n: self.non_tensors[n] for n in wanted if n in self.non_tensors}, self.meta)

    def pop(self, names: Iterable[str]) -> DataProto:
        """Takes the fields `names` out of this batch and returns them as a batch."""
        taken = self.select(names)
        for name in taken.names():
            self.tensors.pop(name, None)
            self.non_tensors.pop(name, None)
        return taken

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Fields under new names ({old: new}); the others keep theirs."""
        self.require(names, "rename")
        result = [names.get(name, name) for name in self.names()]
        if len(set(result)) < len(result):
            raise BatchError(f"rename {dict(names)} gives two fields one name")
        return DataProto({names.get(n, n): v for n, v in self.tensors.items()},
                         {names.get(n, n): v for n, v in self.non_tensors.items()}, self.meta)

    def union(self, other: DataProto) -> DataProto:
        """The fields and meta of both. A name that both have must hold the same there."""
        if self.names() and other.names() and len(self) != len(other):
            raise BatchError(f"union of {len(self)} rows with {len(other)} rows")
        for name in other.names():
            if name in self and not _same(self[name], other[name]):
                raise BatchError(f"union: both batches have field {name!r} with different contents; rename or pop one")
        return DataProto({**self.tensors, **other.tensors}, {**self.non_tensors, **other.non_tensors},
                         _merge_meta([self.meta, other.meta]))

    # ---- rows ----

    def reorder(self, index: Sequence[int] | torch.Tensor) -> DataProto:
        """Rows `index` [M], in that order; a row may come several times or not at all."""
        index = torch.as_tensor(index, dtype=torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise BatchError(f"reorder: index {int(index.min())}..{int(index.max())} outside the {len(self)} rows")
        known: list[tuple[torch.Tensor, torch.Tensor]] = []  # most fields share their lengths: one flat index for all
        tensors: dict[str, torch.Tensor | Ragged] = {}
        for name, value in self.tensors.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value.index_select(0, index.to(value.device))
                continue
            here = index.to(value.lengths.device)
            flat = next((f for lengths, f in known
                         if lengths.device == here.device and torch.equal(lengths, value.lengths)), None)
            if flat is None:
                flat = value.gather_index(here)
                known.append((value.lengths, flat))
            tensors[name] = value.reorder(here, flat)
        order = index.tolist()
        return DataProto(tensors, {n: [v[i] for i in order] for n, v in self.non_tensors.items()}, self.meta)

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Every row `n` times: aabb if interleaved, abab otherwise."""
        if n < 1:
            raise BatchError(f"repeat: n = {n}, must be at least 1")
        rows = torch.arange(len(self))
        return self.reorder(rows.repeat_interleave(n) if interleave else rows.repeat(n))

    def split(self, sizes: Sequence[int]) -> list[DataProto]:
        """Consecutive pieces of `sizes` rows (views). The sizes must sum to the number of rows."""
        sizes = [int(size) for size in sizes]
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise BatchError(f"split: sizes {sizes} sum to {sum(sizes)}, the batch has {len(self)} rows")
        pieces: list[tuple[dict, dict]] = [({}, {}) for _ in sizes]
        for name, value in self.tensors.items():
            for piece, part in zip(pieces, value.split(sizes), strict=True):
                piece[0][name] = part
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for name, items in self.non_tensors.items():
            for piece, start, size in zip(pieces, starts, sizes, strict=True):
                piece[1][name] = items[start: start + size]
        return [DataProto(tensors, non_tensors, self.meta) for tensors, non_tensors in pieces]

    def chunk(self, n: int) -> list[DataProto]:
        """Exactly `n` consecutive pieces; sizes differ by at most one (the first are larger), and may be 0."""
        if n < 1:
            raise BatchError(f"chunk: n = {n}, must be at least 1")
        return self.split([len(self) // n + (i < len(self) % n) for i in range(n)])

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """The rows of all batches, in order. They must have the same fields; pieces without any field are skipped."""
        pieces = [b for b in batches if b.names()]
        meta = _merge_meta([b.meta for b in batches])
        if not pieces:
            return DataProto(meta=meta)
        first = pieces[0]
        for i, piece in enumerate(pieces):
            if set(piece.names()) != set(first.names()):
                raise BatchError(f"concat: piece {i} and piece 0 differ in field(s) "
                                 f"{sorted(set(piece.names()) ^ set(first.names()))}")
        tensors: dict[str, torch.Tensor | Ragged] = {}
        for name, value in first.tensors.items():
            parts = [piece[name] for piece in pieces]
            kinds = {_kind(part) for part in parts}
            if len(kinds) > 1:
                raise BatchError(f"concat: field {name!r} differs between the pieces: {sorted(kinds)}")
            tensors[name] = Ragged.concat(parts) if isinstance(value, Ragged) else torch.cat(parts)
        non_tensors = {name: [item for piece in pieces for item in piece[name]] for name in first.non_tensors}
        return DataProto(tensors, non_tensors, meta)

    def pad_rows(self, to: int) -> DataProto:
        """`to` rows: this batch and, behind it, copies of its shortest row without weight (`response_mask` all False).

        Undone by `unpad`. Raises BatchError when there are more rows than `to`, or none to copy.
        """
        if not 0 < len(self) <= to:
            raise BatchError(f"pad_rows: cannot pad {len(self)} rows to {to}")
        if to == len(self):
            return self
        tokens = torch.zeros(len(self), dtype=torch.int64)
        for value in self.tensors.values():
            if isinstance(value, Ragged):
                tokens += value.lengths.cpu()
        padding = self.reorder(tokens.argmin().expand(to - len(self)))
        mask = padding.tensors.get("response_mask")
        if mask is not None:
            padding.tensors["response_mask"] = (
                Ragged(torch.zeros_like(mask.values), mask.lengths) if isinstance(mask, Ragged)
                else torch.zeros_like(mask)
            )
        padded = DataProto.concat([self, padding])
        padded.meta["rows_before_padding"] = len(self)
        return padded

    def unpad(self, rows: int | None = None) -> DataProto:
        """The first `rows` rows (default: what `pad_rows` noted in meta; all rows when it noted nothing)."""
        meta = dict(self.meta)
        noted = meta.pop("rows_before_padding", len(self))
        rows = noted if rows is None else rows
        if not 0 <= rows <= len(self):
            raise BatchError(f"unpad: {rows} rows wanted, the batch has {len(self)}")
        kept = self.split([rows, len(self) - rows])[0]
        return DataProto(kept.tensors, kept.non_tensors, meta)

    def mini_batches(self, size: int, shuffle_seed: int | None = None) -> Iterator[DataProto]:
        """Every row exactly once in pieces of `size` rows; the last piece is smaller when `size` does not divide.

        `shuffle_seed` fixes a random order; None keeps the batch's order. Each piece has its own meta dict.
        """
        if size < 1:
            raise BatchError(f"mini_batches: size {size}, must be at least 1")
        batch = self
        if shuffle_seed is not None:
            batch = self.reorder(torch.randperm(len(self), generator=torch.Generator().manual_seed(shuffle_seed)))
        sizes = [min(size, len(self) - start) for start in range(0, len(self), size)]
        yield from batch.split(sizes)

    def to(self, device: torch.device | str) -> DataProto:
        """All tensors on `device`."""
        return DataProto({n: v.to(device) for n, v in self.tensors.items()}, self.non_tensors, self.meta)

    # ---- comparing and keeping ----

    def difference(self, other: DataProto) -> str | None:
        """The first difference in words, or None. NaN equals NaN; fields may stand in another order."""
        if set(self.names()) != set(other.names()):
            return f"only one has field(s) {sorted(set(self.names()) ^ set(other.names()))}"
        if len(self) != len(other):
            return f"{len(self)} rows against {len(other)}"
        differing = [name for name, value in self.items() if not _same(value, other[name])]
        if differing:
            return f"field(s) {differing} differ"
        return None if _same(self.meta, other.meta) else "meta differs"

    def equal(self, other: DataProto) -> bool:
        """Same fields, rows, dtypes, contents and meta; NaN equals NaN."""
        return self.difference(other) is None

    def save(self, folder: str | Path) -> None:
        """Write the directory `folder` (batch.safetensors + batch.json), replacing an older batch there."""
        from rlhf_megatron.data.files import save_batch

        save_batch(self, Path(folder))

    @staticmethod
    def load(folder: str | Path) -> DataProto:
        """Read what `save` wrote. BatchError names the file that is missing or damaged."""
        from rlhf_megatron.data.files import load_batch

        return load_batch(Path(folder))


def _kind(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged {value.values.dtype} {tuple(value.values.shape[1:])}"
    return f"dense {value.dtype} {tuple(value.shape[1:])}" if isinstance(value, torch.Tensor) else "non-tensor"


def _merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and not _same(merged[key], value):
                raise BatchError(f"meta {key!r} differs between the batches: {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged


def _same(a: Any, b: Any) -> bool:
    """Deep equality with NaN equal to NaN; 1, 1.0 and True are told apart."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Ragged):
        return a.equal(b)
    if isinstance(a, torch.Tensor):
        return same_values(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)
