"""Positions and masks come from lengths and finish reasons, never from token ids."""

import pytest
import torch

from rlhf_megatron.data.positions import packed_positions, positions, response_mask, truncated
from rlhf_megatron.data.proto import Ragged

LEFT = [0, 0, 1, 1, 1]


def test_position_is_the_number_of_valid_tokens_before():
    assert positions(torch.tensor([LEFT]))[0, 2:].tolist() == [0, 1, 2]
    assert positions(torch.tensor([LEFT, [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])).tolist() == [
        [0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert positions(torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[0, 0, 0]]
    assert packed_positions(torch.tensor([3, 0, 2])).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("pads", [0, 1, 7])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_id", [0, 13])
def test_log_probs_of_a_padded_row_equal_the_unpadded_row(pads, side, pad_id):
    """A one-layer attention model with learned positions, in a batch with a longer row."""
    torch.manual_seed(0)
    vocab, hidden, tokens = 17, 16, [3, 13, 5, 9]
    embed, place = torch.randn(vocab, hidden), torch.randn(16, hidden)
    wq, wk, wv = torch.randn(3, hidden, hidden) / 4

    def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = embed[ids] + place[positions(mask)]
        scores = (x @ wq) @ (x @ wk).transpose(1, 2) / 4
        order = torch.arange(ids.shape[1])
        visible = (order[None, :] <= order[:, None]) & mask[:, None, :]
        scores = scores.masked_fill(~visible, -1e9)
        return ((scores.softmax(-1) @ (x @ wv)) @ embed.T).log_softmax(-1)

    alone = log_probs(torch.tensor([tokens]), torch.ones(1, 4, dtype=torch.bool))[0]
    batch = Ragged.from_list([tokens, list(range(4 + pads))])
    ids, mask = batch.pad(pad_id, side=side), batch.mask(side=side)
    assert torch.allclose(log_probs(ids, mask)[0][mask[0]], alone, atol=1e-5)


def test_response_mask_is_the_reported_length():
    # pad and end id are both 9 in [5, 6, 9, 9, 9]: the first 9 ended the response and counts, the others are padding
    assert response_mask(torch.tensor([3]), 5).int().tolist() == [[1, 1, 1, 0, 0]]
    # no end id at all, cut at the limit: [5, 6, 7, 8, 4]
    assert response_mask(torch.tensor([5]), 5).int().tolist() == [[1, 1, 1, 1, 1]]
    # ended by a stop string after two tokens: [5, 6, 9, 9, 9]
    assert response_mask(torch.tensor([2]), 5).int().tolist() == [[1, 1, 0, 0, 0]]
    # end ids 9 and 8: [5, 8, 9, 9] ended at the 8
    assert response_mask(torch.tensor([2]), 4).int().tolist() == [[1, 1, 0, 0]]
    # the end id comes first: [9, ...]
    assert response_mask(torch.tensor([1]), 3).int().tolist() == [[1, 0, 0]]
    assert response_mask(torch.tensor([1, 3])).int().tolist() == [[1, 0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="6 tokens.*width of 5"):
        response_mask(torch.tensor([6]), 5)


def test_ragged_mask_says_the_same():
    lengths = torch.tensor([3, 5, 2, 1])
    assert torch.equal(Ragged(torch.full((11,), 9), lengths).mask(), response_mask(lengths))


def test_truncation_comes_from_the_finish_reason():
    # whatever ids stand in prompt or response: a prompt that holds the end id hides nothing
    assert truncated(["stop", "length", "stop", "stop"]).tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="row 1 is 'eos'"):
        truncated(["stop", "eos"])
