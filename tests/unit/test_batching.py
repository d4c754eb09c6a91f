"""Micro-batches: where hidden states, targets and fields of a response token stand, and what may not be in a batch."""

import pytest
import torch

from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.mcore.batching import Batcher, Cut, kept_positions


def batch_of(lengths, **fields):
    prompts = [[10 * (i + 1) + j for j in range(p)] for i, (p, _) in enumerate(lengths)]
    responses = [[10 * (i + 1) + 5 + j for j in range(r)] for i, (_, r) in enumerate(lengths)]
    sizes = torch.tensor([r for _, r in lengths])
    return DataProto(tensors={
        "prompts": Ragged.from_list(prompts), "responses": Ragged.from_list(responses),
        **{name: Ragged(values, sizes) for name, values in fields.items()},
    })


LENGTHS = [(2, 3), (1, 1), (3, 0), (2, 2)]


def planned(batch, rows=1, vocab=100, reads=(), count=1, valid_only=False, **cut):
    batcher = Batcher(batch, Cut(rows=rows, **cut), vocab, reads, valid_only=valid_only)
    batcher.plan(count)
    return batcher


CUTS = [{"rows": 1}, {"rows": 2}, {"rows": 3}, {"rows": 5}, {"tokens": 5}, {"tokens": 10},
        {"rows": 2, "sequence_parallel": 4}, {"tokens": 8, "cp": 2}, {"rows": 2, "cp": 2, "sequence_parallel": 2}]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_every_response_token_is_scored_once_by_the_position_before_it(cut, packed):
    """Of the whole hidden states [T, b], rebuilt from what the context-parallel ranks hold."""
    batch = batch_of(LENGTHS, weight=torch.arange(6.0))
    cp = cut.get("cp", 1)
    batchers = [planned(batch, reads=("weight",), packed=packed, cp_rank=rank, **cut) for rank in range(cp)]
    seen = []
    for held in zip(*batchers, strict=True):
        micro = held[0]
        b, t = micro.input_ids.shape
        assert t * cp % (cp * cut.get("sequence_parallel", 1)) == 0 and (b == 1 if packed else b == max(micro.rows, 1))
        assert b * t * cp <= cut.get("tokens", 1000)
        targets = torch.full((len(micro.slots),), -1)
        before = targets.clone()
        for one in held:
            assert one.input_ids.shape == micro.input_ids.shape and torch.equal(one.slots, micro.slots)
            here = slice(None) if one.here is None else one.here
            assert (targets[here] == -1).all(), "two ranks score one token"
            targets[here] = one.targets
            before[here] = one.input_ids.t().reshape(-1)[one.hidden_index]  # as hidden states lie: [T * b]
        exact = batch["responses"].values[micro.places]
        assert torch.equal(targets, exact)
        # ids of a row count up by one, and by one more than its prompt's length from prompt to response
        rows = torch.arange(4).repeat_interleave(batch["responses"].lengths)[micro.places]
        first = torch.tensor([t == 0 for _, r in LENGTHS for t in range(r)])[micro.places]
        jump = torch.where(first, torch.tensor([5 - (p - 1) for p, _ in LENGTHS])[rows], 1)
        assert torch.equal(before + jump, exact)
        assert torch.equal(micro.fields["weight"].reshape(-1)[micro.slots], batch["weight"].values[micro.places])
        assert int(micro.fields["response_mask"].sum()) == len(micro.slots)
        view = micro.padded(targets.float())
        assert torch.equal(view[micro.fields["response_mask"]], targets.float())
        seen += micro.places.tolist()
    assert sorted(seen) == list(range(6))


def test_packed_rows_lie_one_behind_the_other_and_count_their_own_positions():
    (micro,) = planned(batch_of(LENGTHS), rows=4, packed=True)
    assert micro.lengths == (5, 2, 3, 4)
    assert micro.input_ids.tolist() == [[10, 11, 15, 16, 17, 20, 25, 30, 31, 32, 40, 41, 45, 46]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 1, 2, 3]]


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_every_sequence():
    assert kept_positions([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert kept_positions([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    (micro,) = planned(batch_of(LENGTHS), rows=4, packed=True, cp=2, cp_rank=1)
    assert micro.lengths == (8, 4, 4, 4)  # of the whole sequences, padded to 4
    assert micro.input_ids.tolist() == [[15, 16, 17, 0, 25, 0, 31, 32, 41, 45]]


def test_a_packed_micro_batch_is_filled_up_to_its_multiple_by_a_sequence_of_its_own():
    (micro,) = planned(batch_of([(2, 3), (1, 1)]), rows=2, packed=True, sequence_parallel=4)
    assert micro.lengths == (5, 2, 1)


def test_outputs_come_back_in_the_order_of_the_rows():
    batch = batch_of(LENGTHS)
    batcher = planned(batch, 3)
    ragged = batcher.ragged([(m.places, m.targets.float()) for m in batcher])
    assert ragged.to_list() == [[float(x) for x in row] for row in batch["responses"].to_list()]


def test_masked_tokens_are_not_scored_and_their_fields_stay_under_the_mask():
    mask = torch.tensor([True, False, True, False, True, True])
    (micro,) = planned(batch_of(LENGTHS, response_mask=mask), 4, reads=("response_mask",), valid_only=True)
    assert len(micro.targets) == 4 and int(micro.fields["response_mask"].sum()) == 4
    assert micro.padded(micro.targets.float())[~micro.fields["response_mask"]].abs().sum() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_beyond_the_rows_weigh_nothing(packed):
    batch = batch_of(LENGTHS).split([4, 0])[1]
    micros = list(planned(batch, 2, count=2, packed=packed, sequence_parallel=2))
    assert len(micros) == 2
    for micro in micros:
        assert micro.rows == 0 and micro.input_ids.shape == (1, 2) and len(micro.targets) == 0
        assert not micro.fields["response_mask"].any()
    assert [m.rows for m in planned(batch_of(LENGTHS), 4, count=3)] == [4, 0, 0]


def test_short_rows_are_not_padded_to_the_longest_of_the_call():
    batch = batch_of([(2, 2), (1, 4), (1, 1), (2, 3)])
    assert [m.input_ids.shape[1] for m in planned(batch, 2)] == [5, 4]
    assert planned(batch, 2).shapes() == [(2, 5), (2, 4)]
    assert planned(batch, 2, cp=2).shapes() == [(2, 8), (2, 4)]


@pytest.mark.parametrize("packed", [False, True])
def test_stages_without_the_head_get_the_same_inputs_and_nothing_else(packed):
    batch = batch_of(LENGTHS, weight=torch.arange(6.0))
    whole = planned(batch, 3, reads=("weight",), packed=packed, sequence_parallel=2)
    inputs = Batcher(batch, whole.cut, 100, ("weight",), valid_only=True, scored=False)
    assert inputs.plan() == len(whole) and inputs.shapes() == whole.shapes()
    for one, other in zip(inputs, whole, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.position_ids, other.position_ids)
        assert one.lengths == other.lengths and one.rows == other.rows and len(one.slots) == len(one.targets) == 0


def test_what_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        planned(batch_of([(2, 1), (0, 1)]))
    with pytest.raises(ValueError, match=r"responses of row 3 hold token id 46, outside the model's vocabulary of 46"):
        planned(batch_of(LENGTHS), vocab=46)
    with pytest.raises(ValueError, match="micro-batch needs.*advantages"):
        planned(batch_of(LENGTHS), reads=("advantages",))
    batch = batch_of(LENGTHS)
    batch.tensors["advantages"] = batch["prompts"]
    with pytest.raises(ValueError, match="'advantages' is not ragged over the response"):
        planned(batch, reads=("advantages",))
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        planned(batch, 0)
