"""Micro-batches: where hidden states, targets and fields of a response token stand, and what may not be in a batch."""

import pytest
import torch

from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.mcore.batching import Batcher


def batch_of(lengths, **fields):
    prompts = [[10 * (i + 1) + j for j in range(p)] for i, (p, _) in enumerate(lengths)]
    responses = [[10 * (i + 1) + 5 + j for j in range(r)] for i, (_, r) in enumerate(lengths)]
    sizes = torch.tensor([r for _, r in lengths])
    return DataProto(tensors={
        "prompts": Ragged.from_list(prompts), "responses": Ragged.from_list(responses),
        **{name: Ragged(values, sizes) for name, values in fields.items()},
    })


LENGTHS = [(2, 3), (1, 1), (3, 0), (2, 2)]


@pytest.mark.parametrize("one_length", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_response_token_is_scored_once_by_the_position_before_it(size, one_length):
    batch = batch_of(LENGTHS, weight=torch.arange(6.0))
    batcher = Batcher(batch, size, 100, ("weight",), one_length=one_length)
    micros = list(batcher)
    assert len(micros) == len(batcher) == -(-4 // size) and sum(m.rows for m in micros) == 4
    seen = []
    for micro in micros:
        b, t = micro.input_ids.shape
        assert b == size and (not one_length or t == 5)
        flat_ids = micro.input_ids.t().reshape(-1)  # as hidden states lie: [T * b]
        torch.testing.assert_close(flat_ids[micro.hidden_index + b], micro.targets)  # the next position of the same row
        assert torch.equal(micro.position_ids, torch.arange(t).expand(b, t))
        assert torch.equal(micro.fields["weight"].reshape(-1)[micro.slots], batch["weight"].values[micro.places])
        assert torch.equal(micro.fields["response_mask"].sum(1)[micro.rows :], torch.zeros(size - micro.rows))
        assert int(micro.fields["response_mask"].sum()) == len(micro.targets)
        view = micro.padded(micro.targets.float())
        assert torch.equal(view[micro.fields["response_mask"]], micro.targets.float())
        seen += micro.places.tolist()
    assert sorted(seen) == list(range(6))


def test_outputs_come_back_in_the_order_of_the_rows():
    batch = batch_of(LENGTHS)
    batcher = Batcher(batch, 3, 100)
    ragged = batcher.ragged([(m.places, m.targets.float()) for m in batcher])
    assert ragged.to_list() == [[float(x) for x in row] for row in batch["responses"].to_list()]


def test_masked_tokens_are_not_scored_and_their_fields_stay_under_the_mask():
    mask = torch.tensor([True, False, True, False, True, True])
    (micro,) = Batcher(batch_of(LENGTHS, response_mask=mask), 4, 100, ("response_mask",), valid_only=True)
    assert len(micro.targets) == 4 and int(micro.fields["response_mask"].sum()) == 4
    assert micro.padded(micro.targets.float())[~micro.fields["response_mask"]].abs().sum() == 0


def test_no_rows_make_one_micro_batch_of_weight_zero():
    batch = batch_of(LENGTHS).split([4, 0])[1]
    (micro,) = Batcher(batch, 2, 100)
    assert micro.rows == 0 and micro.input_ids.shape == (2, 1) and len(micro.targets) == 0
    assert not micro.fields["response_mask"].any()


def test_short_rows_are_not_padded_to_the_longest_of_the_call():
    batch = batch_of([(2, 2), (1, 4), (1, 1), (2, 3)])
    assert [m.input_ids.shape[1] for m in Batcher(batch, 2, 100)] == [4, 5]
    assert [m.input_ids.shape[1] for m in Batcher(batch, 2, 100, one_length=True)] == [5, 5]


def test_what_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        Batcher(batch_of([(2, 1), (0, 1)]), 1, 100)
    with pytest.raises(ValueError, match=r"responses of row 3 hold token id 46, outside the model's vocabulary of 46"):
        Batcher(batch_of(LENGTHS), 1, 46)
    with pytest.raises(ValueError, match="micro-batch needs.*advantages"):
        Batcher(batch_of(LENGTHS), 1, 100, ("advantages",))
    batch = batch_of(LENGTHS)
    batch.tensors["advantages"] = batch["prompts"]
    with pytest.raises(ValueError, match="'advantages' is not ragged over the response"):
        Batcher(batch, 1, 100, ("advantages",))
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        Batcher(batch, 0, 100)
