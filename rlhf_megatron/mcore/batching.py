"""Rows of a DataProto as micro-batches: padded model inputs, and where each response token's hidden state stands.

The hidden state that scores response token t of a row with P prompt tokens is that of position P - 1 + t: the position
before the token. Values use the same positions: the value before a token is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlhf_megatron.data.proto import DataProto, Ragged

MASK = "response_mask"  # always among a micro-batch's fields, whether the batch has it or not


@dataclass(frozen=True)
class MicroBatch:
    """b rows padded to T tokens; N of their response tokens are scored. Rows beyond `rows` are padding of weight zero.

    input_ids, position_ids: [b, T] int64.
    hidden_index: [N] positions of the scored tokens in hidden states [T, b, H] seen as [T * b, H].
    slots: [N] their places in a [b, R] view seen as [b * R].
    places: [N] their places in the flat values of a response field of the whole batch.
    targets: [N] the tokens themselves.
    fields: name -> [b, R]; what stands beyond a response is zero (False), and False in `response_mask`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    hidden_index: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    fields: dict[str, torch.Tensor]
    rows: int

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the scored tokens [N] -> [b, R], zero elsewhere; differentiable."""
        shape = self.fields[MASK].shape
        return values.new_zeros(shape.numel()).index_copy(0, self.slots, values).view(shape)


class Batcher:
    """Cuts one batch into micro-batches of `size` rows.

    Args:
        batch: `prompts` and `responses`, and every field in `reads`, which must be ragged over the response.
        size: rows per micro-batch; the last one is filled up with empty rows of weight zero.
        vocab_size: token ids must be below it.
        reads: response fields wanted as [b, R] views.
        valid_only: score only the tokens whose `response_mask` is True (if the batch has one): nothing else is used.
        one_length: pad all micro-batches to one length, as a pipeline with fixed message shapes needs. Otherwise rows
            are taken in the order of their length and each micro-batch is as long as its own longest row.
        multiple: every micro-batch's length is one, as sequence parallelism needs.
        device: where the tensors go.

    Raises:
        ValueError: a field that is missing or not ragged over the response, a row without a prompt, or a token id
            outside the vocabulary, with the row and the value.
    """

    def __init__(self, batch: DataProto, size: int, vocab_size: int, reads: Sequence[str] = (), *,
                 valid_only: bool = False, one_length: bool = False, multiple: int = 1,
                 device: torch.device | str = "cpu") -> None:
        if size < 1:
            raise ValueError(f"micro_batch_size={size}: a micro-batch has at least one row")
        batch.require(("prompts", "responses", *(name for name in reads if name != MASK)), "a micro-batch")
        self.size, self.device, self.one_length, self.multiple = size, device, one_length, multiple
        self.prompts, self.responses = batch["prompts"], batch["responses"]
        self.lengths = self.responses.lengths.cpu()
        self.fields = {name: batch[name] for name in reads if name != MASK}
        if MASK in batch.tensors:
            self.fields[MASK] = batch[MASK]
        self.valid = self.fields[MASK].values.bool().cpu() if valid_only and MASK in self.fields else None
        self._check(vocab_size)
        self.totals = self.prompts.lengths.cpu() + self.lengths
        order = torch.arange(len(self.lengths)) if one_length else self.totals.argsort(stable=True)
        self.groups = list(order.split(size)) if len(order) else [order]
        self.sequence_length = self._padded(int(self.totals.max()) if len(order) else 1)

    def __len__(self) -> int:
        """Number of micro-batches: at least one, so that a replica without rows still takes part."""
        return len(self.groups)

    def __iter__(self) -> Iterator[MicroBatch]:
        prompt_starts, starts = _starts(self.prompts.lengths.cpu()), _starts(self.lengths)
        for rows in self.groups:
            yield self._micro_batch(rows, prompt_starts, starts)

    def ragged(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ragged:
        """(places, values) of all micro-batches -> one response field, in the order of the batch's rows, on the CPU."""
        out = torch.zeros(int(self.lengths.sum()), dtype=torch.float32)
        for places, values in parts:
            out[places.cpu()] = values.float().cpu()
        return Ragged(out, self.lengths)

    def _padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def _micro_batch(self, rows: torch.Tensor, prompt_starts: torch.Tensor, starts: torch.Tensor) -> MicroBatch:
        lengths = self.lengths[rows]
        prompt_lengths = self.prompts.lengths.cpu()[rows]
        if self.one_length or not len(rows):
            longest = self.sequence_length
        else:
            longest = self._padded(int(self.totals[rows].max()))
        input_ids = torch.zeros(self.size, longest, dtype=torch.int64)
        prompts, responses = self.prompts.values.cpu(), self.responses.values.cpu()
        for i, row in enumerate(rows.tolist()):
            p, r = int(prompt_lengths[i]), int(lengths[i])
            input_ids[i, :p] = prompts[prompt_starts[row] : prompt_starts[row] + p]
            input_ids[i, p : p + r] = responses[starts[row] : starts[row] + r]
        width = max(int(lengths.max()) if len(rows) else 0, 1)
        row_of = torch.arange(len(rows)).repeat_interleave(lengths)
        t = torch.arange(len(row_of)) - _starts(lengths).repeat_interleave(lengths)
        slots = row_of * width + t
        places = starts[rows].repeat_interleave(lengths) + t
        fields = {}
        for name, field in self.fields.items():
            values = field.values.cpu()
            view = values.new_zeros(self.size * width)
            view[slots] = values[places]
            fields[name] = view.view(self.size, width)
        if MASK not in fields:
            mask = torch.zeros(self.size * width, dtype=torch.bool)
            mask[slots] = True
            fields[MASK] = mask.view(self.size, width)
        fields[MASK] = fields[MASK].bool()
        hidden_index = (prompt_lengths.repeat_interleave(lengths) - 1 + t) * self.size + row_of
        if self.valid is not None:
            chosen = self.valid[places]
            hidden_index, slots, places = hidden_index[chosen], slots[chosen], places[chosen]
        position_ids = torch.arange(longest).expand(self.size, longest).contiguous()
        return MicroBatch(
            input_ids=input_ids.to(self.device),
            position_ids=position_ids.to(self.device),
            hidden_index=hidden_index.to(self.device),
            slots=slots.to(self.device),
            places=places,
            targets=responses[places].to(self.device),
            fields={name: view.to(self.device) for name, view in fields.items()},
            rows=len(rows),
        )

    def _check(self, vocab_size: int) -> None:
        for name, field in self.fields.items():
            if not isinstance(field, Ragged) or not torch.equal(field.lengths.cpu(), self.lengths):
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


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row begins in flat values."""
    return lengths.cumsum(0) - lengths
