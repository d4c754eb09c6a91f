"""Rows of a DataProto as micro-batches: padded or packed model inputs, and where each response token's state stands.

The hidden state that scores response token t of a row with P prompt tokens is that of position P - 1 + t: the position
before the token. Values use the same positions: the value before a token is taken.

Context parallelism cuts every sequence into 2 x cp chunks; rank r holds chunks r and 2 x cp - 1 - r, one early and one
late, so that causal attention is about the same work everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlhf_megatron.data import packing
from rlhf_megatron.data.proto import DataProto, Ragged

MASK = "response_mask"  # always among a micro-batch's fields, whether the batch has it or not


@dataclass(frozen=True)
class Cut:
    """How one role forms and cuts its micro-batches.

    rows: rows of a micro-batch, if `tokens` is 0.
    tokens: its strict limit of tokens, padding included.
    packed: rows one behind the other, instead of side by side and padded.
    cp, cp_rank: context-parallel ranks, and which of them this is.
    sequence_parallel: ranks that share what a context-parallel rank holds of a sequence (1: it is not shared).
    linear, quadratic: cost of a row of length L, linear * L + quadratic * L^2, by which packed ones are balanced.
    """

    rows: int = 1
    tokens: int = 0
    packed: bool = False
    cp: int = 1
    cp_rank: int = 0
    sequence_parallel: int = 1
    linear: float = 1.0
    quadratic: float = 0.0

    @property
    def sequence_multiple(self) -> int:
        """The length of every packed sequence is a multiple of this: its chunks are equal."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def multiple(self) -> int:
        """The length of a whole micro-batch is a multiple of this."""
        return math.lcm(self.sequence_multiple, self.cp * self.sequence_parallel)


@dataclass(frozen=True)
class MicroBatch:
    """Rows as one model input of b sequences of T tokens (packed: b is 1); N of their response tokens are scored.

    Of the T tokens a context-parallel rank holds T / cp, and of the N scored ones n; without cp n is N.

    input_ids, position_ids: [b, T / cp] int64.
    lengths: packed, tokens of each of the sequences that make up the T; otherwise None.
    Where the model has no head, n and N are 0 and there are no fields.

    hidden_index: [n] positions of the scored tokens in hidden states [T / cp, b, H] seen as [T / cp * b, H].
    here: [n] which of the N they are; None: all.
    targets: [n] the tokens themselves.
    slots: [N] places in a [rows, R] view seen as [rows * R].
    places: [N] places in the flat values of a response field of the whole batch, on the CPU.
    fields: name -> [rows, R]; what stands beyond a response is zero (False), and False in `response_mask`.
    rows: of the batch; without any there is one field row, of padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...] | None
    hidden_index: torch.Tensor
    here: torch.Tensor | None
    targets: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    fields: dict[str, torch.Tensor]
    rows: int

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the scored tokens [N] -> [rows, R], zero elsewhere; differentiable."""
        shape = self.fields[MASK].shape
        return values.new_zeros(shape.numel()).index_copy(0, self.slots, values).view(shape)


class Batcher:
    """Cuts one batch into micro-batches.

    Args:
        batch: `prompts` and `responses`, and every field in `reads`, which must be ragged over the response.
        cut: how.
        vocab_size: token ids must be below it.
        reads: response fields wanted as [rows, R] views.
        valid_only: score only the tokens whose `response_mask` is True (if the batch has one): nothing else is used.
        scored: False on ranks without the head: inputs only.
        device: where the tensors go.

    Call `plan` before anything is read. Micro-batches are made when they are asked for.

    Raises:
        ValueError: a field that is missing or not ragged over the response, a row without a prompt, or a token id
            outside the vocabulary, with the row and the value.
    """

    def __init__(self, batch: DataProto, cut: Cut, vocab_size: int, reads: Sequence[str] = (), *,
                 valid_only: bool = False, scored: bool = True, device: torch.device | str = "cpu") -> None:
        batch.require(("prompts", "responses", *(name for name in reads if name != MASK)), "a micro-batch")
        self.cut, self.scored, self.device = cut, scored, device
        self.fields = {name: batch[name] for name in reads if name != MASK}
        if MASK in batch.tensors:
            self.fields[MASK] = batch[MASK]
        self.prompts, self.responses = batch["prompts"], batch["responses"]
        self._check(vocab_size)
        self.prompt_lengths, self.lengths = self.prompts.lengths.cpu(), self.responses.lengths.cpu()
        self.totals = self.prompt_lengths + self.lengths
        self._prompt_tokens, self._response_tokens = self.prompts.values.cpu(), self.responses.values.cpu()
        self._values = {name: field.values.cpu() for name, field in self.fields.items()} if scored else {}
        self._valid = self._values[MASK].bool() if valid_only and MASK in self._values else None
        self._starts = _starts(self.prompt_lengths), _starts(self.lengths)

    def plan(self, count: int = 1) -> int:
        """Form the micro-batches, at least `count`, so that a replica with few rows or none takes part -> how many."""
        unit = self.cut.sequence_multiple if self.cut.packed else self.cut.multiple
        lengths = [_up(total, unit) for total in self.totals.tolist()]
        if self.cut.tokens:
            self.groups = packing.by_tokens(
                lengths, self.cut.tokens // self.cut.multiple * self.cut.multiple, self.cut.packed, count,
                self.cut.linear, self.cut.quadratic)
        else:
            self.groups = packing.by_rows(lengths, self.cut.rows, count)
        return len(self.groups)

    def shapes(self) -> list[tuple[int, int]]:
        """[b, T] of every micro-batch, before context parallelism cuts it."""
        return [(1 if self.cut.packed else max(len(rows), 1), sum(self._sequences(rows))) for rows in self.groups]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self._micro_batch(rows) for rows in self.groups)

    def ragged(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ragged:
        """(places, values) of all micro-batches -> one response field, in the order of the batch's rows, on the CPU."""
        out = torch.zeros(int(self.lengths.sum()), dtype=torch.float32)
        for places, values in parts:
            out[places] = values.float().cpu()
        return Ragged(out, self.lengths)

    def _sequences(self, rows: Sequence[int]) -> list[int]:
        """Lengths of the sequences that T is made of: of the packed rows, or the one that padded rows have."""
        totals = [int(self.totals[row]) for row in rows]
        if not self.cut.packed:
            return [_up(max(totals, default=1), self.cut.multiple)]
        held = [_up(total, self.cut.sequence_multiple) for total in totals]
        tail = _up(max(sum(held), 1), self.cut.multiple) - sum(held)
        return held + ([tail] if tail else [])  # a sequence of padding fills the micro-batch up to its multiple

    def _micro_batch(self, group: Sequence[int]) -> MicroBatch:
        cut, rows, held = self.cut, torch.tensor(group, dtype=torch.int64), self._sequences(group)
        lengths, prompt_lengths, (prompt_starts, starts) = self.lengths[rows], self.prompt_lengths[rows], self._starts
        if cut.packed:
            b, offset = 1, _starts(torch.tensor(held))[: len(rows)]
        else:
            b, offset = max(len(rows), 1), torch.arange(len(rows)) * held[0]
        ids, positions = torch.zeros(b, sum(held), dtype=torch.int64), _counting(torch.tensor(held)).expand(b, -1)
        flat = ids.view(-1)
        for i, row in enumerate(group):
            p, r, at = int(prompt_lengths[i]), int(lengths[i]), int(offset[i])
            flat[at : at + p] = self._prompt_tokens[prompt_starts[row] : prompt_starts[row] + p]
            flat[at + p : at + p + r] = self._response_tokens[starts[row] : starts[row] + r]
        if not self.scored:
            lengths, starts, prompt_lengths, offset = (x[:0] for x in (lengths, starts, prompt_lengths, offset))
            rows = rows[:0]

        width = max(int(lengths.max()) if len(rows) else 0, 1)
        row_of, t = torch.arange(len(rows)).repeat_interleave(lengths), _counting(lengths)
        slots, places = row_of * width + t, starts[rows].repeat_interleave(lengths) + t
        fields = self._fields(slots, places, max(len(rows), 1), width)
        position = prompt_lengths.repeat_interleave(lengths) - 1 + t
        column = offset.repeat_interleave(lengths) + position if cut.packed else position
        if self._valid is not None:
            chosen = self._valid[places]
            row_of, column, slots, places = row_of[chosen], column[chosen], slots[chosen], places[chosen]
        targets, here = self._response_tokens[places], None
        if cut.cp > 1:
            kept = kept_positions(held, cut.cp, cut.cp_rank)
            place_of = torch.full((sum(held),), -1).index_copy_(0, kept, torch.arange(len(kept)))
            ids, positions, column = ids[:, kept], positions[:, kept], place_of[column]
            here = (column >= 0).nonzero()[:, 0]
            row_of, column, targets = row_of[here], column[here], targets[here]
        hidden_index = column if cut.packed else column * b + row_of
        to = self.device
        return MicroBatch(
            input_ids=ids.contiguous().to(to), position_ids=positions.contiguous().to(to),
            lengths=tuple(held) if cut.packed else None,
            hidden_index=hidden_index.to(to), here=None if here is None else here.to(to), targets=targets.to(to),
            slots=slots.to(to), places=places, fields={name: view.to(to) for name, view in fields.items()},
            rows=len(group),
        )

    def _fields(self, slots: torch.Tensor, places: torch.Tensor, rows: int, width: int) -> dict[str, torch.Tensor]:
        """[rows, width] views of the fields, and the mask, which is True for every token if the batch has none."""
        fields = {}
        for name, values in self._values.items():
            view = values.new_zeros(rows * width)
            view[slots] = values[places]
            fields[name] = view.view(rows, width)
        if MASK not in fields:
            fields[MASK] = torch.zeros(rows * width, dtype=torch.bool).index_fill_(0, slots, True).view(rows, width)
        fields[MASK] = fields[MASK].bool()
        return fields

    def _check(self, vocab_size: int) -> None:
        for name, field in self.fields.items():
            if not isinstance(field, Ragged) or not torch.equal(field.lengths.cpu(), self.responses.lengths.cpu()):
                raise ValueError(f"field {name!r} is not ragged over the response: one value per response token is "
                                 "needed; give it the lengths of `responses`")
        empty = (self.prompts.lengths == 0).nonzero()
        if len(empty):
            raise ValueError(f"row {int(empty[0])} has an empty prompt: its first response token has nothing before it "
                             "to be scored by; give every prompt at least one token")
        for name, field in (("prompts", self.prompts), ("responses", self.responses)):
            outside = ((field.values < 0) | (field.values >= vocab_size)).nonzero()
            if len(outside):
                place = int(outside[0])
                row = int((field.lengths.cumsum(0) <= place).sum())
                raise ValueError(f"{name} of row {row} hold token id {int(field.values[place])}, outside the model's "
                                 f"vocabulary of {vocab_size}; the tokenizer and the model do not belong together")


def kept_positions(lengths: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Positions, in sequences laid one behind the other, that a context-parallel rank holds, in its order.

    Every length must be a multiple of 2 x cp.
    """
    kept, first = [], 0
    for length in lengths:
        chunk = length // (2 * cp)
        for index in (rank, 2 * cp - 1 - rank):
            kept.append(torch.arange(first + index * chunk, first + (index + 1) * chunk))
        first += length
    return torch.cat(kept)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row begins in flat values."""
    return lengths.cumsum(0) - lengths


def _counting(lengths: torch.Tensor) -> torch.Tensor:
    """0 .. length - 1 for every length, one behind the other."""
    return torch.arange(int(lengths.sum())) - _starts(lengths).repeat_interleave(lengths)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
