"""Drawing tokens: noise by coordinates, the sampled distribution exactly, and log-probs of the kind asked for."""

import math

import numpy as np
import pytest
import torch

from rlhf_megatron.generation.engine import Sampling
from rlhf_megatron.generation.sampling import draw, sampling_log_probs, uniforms

LOG4 = torch.tensor([[math.log(4.0), 0.0]])


def sampling(**changes) -> Sampling:
    return Sampling(**{"max_tokens": 1, **changes})


# ---- noise ----


def test_noise_depends_on_its_coordinates_only():
    alone = [uniforms(7, 3, [i], [p]).item() for i, p in ((5, 0), (9, 2), (5, 1))]
    together = uniforms(7, 3, [9, 1, 5, 5], [2, 8, 1, 0])
    assert alone == [together[3].item(), together[0].item(), together[2].item()]
    others = [uniforms(*c).item() for c in ((8, 3, [5], [0]), (7, 4, [5], [0]), (7, 3, [6], [0]), (7, 3, [5], [1]))]
    assert len({alone[0], *others}) == 5
    assert uniforms(2**63, 2**40, [2**50], [0]).item() < 1  # large coordinates wrap, they do not overflow


def test_noise_is_uniform_and_uncorrelated_along_every_coordinate():
    n = 20_000
    along = {
        "position": uniforms(1, 1, [4] * n, list(range(n))),
        "sample": uniforms(1, 1, list(range(n)), [0] * n),
        "step": torch.cat([uniforms(1, step, range(20), [0] * 20) for step in range(n // 20)]),
        "seed": torch.cat([uniforms(seed, 1, range(20), [0] * 20) for seed in range(n // 20)]),
    }
    for name, u in along.items():
        assert 0 <= u.min() and u.max() < 1
        counts = torch.histc(u.float(), 50, 0, 1).double()
        # 49 degrees of freedom: above 94 with probability 1e-4
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 94, name
        neighbours = np.corrcoef(u[:-1], u[1:])[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(n), name


# ---- the distribution ----


@pytest.mark.parametrize("changes", [
    {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 2.0, "top_p": 0.7},
])
def test_drawn_tokens_have_the_distribution(changes):
    """Chi-square against probabilities computed from the definition."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -2.0])
    p = (logits / changes.get("temperature", 1.0)).double().softmax(-1)
    keep = p.clone()
    if "top_k" in changes:
        keep[changes["top_k"]:] = 0
    if "top_p" in changes:
        keep[(p.cumsum(-1) - p) >= changes["top_p"]] = 0
    expected = keep / keep.sum()
    n = 40_000
    tokens, _ = draw(logits.expand(n, -1), uniforms(3, 1, range(n), [0] * n), sampling(**changes))
    counts = torch.bincount(tokens, minlength=6).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    statistic = ((counts - n * expected)[kept] ** 2 / (n * expected[kept])).sum()
    degrees = kept.sum() - 1
    assert torch.special.gammaincc(degrees / 2, statistic / 2) > 1e-3  # the chance of a worse fit


@pytest.mark.parametrize(("changes", "kept"), [
    ({"top_p": 0.5}, [0]),           # probabilities .5 .3 .2: the first reaches it
    ({"top_p": 0.500001}, [0, 1]),
    ({"top_p": 1e-9}, [0]),          # never empty
    ({"top_p": 0.81}, [0, 1, 2]),
    ({"top_k": 1}, [0]),
    ({"top_k": 2}, [0, 1]),
    ({"top_k": 3}, [0, 1, 2]),
    ({"top_k": 99}, [0, 1, 2]),      # more than the vocabulary has: off
    ({"top_k": 2, "top_p": 0.6}, [0]),  # renormalised after top-k: .625 .375
])
def test_which_tokens_top_p_and_top_k_keep(changes, kept):
    log_probs = sampling_log_probs(torch.tensor([[0.5, 0.3, 0.2]]).log(), sampling(**changes))
    assert (log_probs[0] > -torch.inf).nonzero()[:, 0].tolist() == kept
    assert log_probs.exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, 3), (0.7, 7), (0.8, 8), (0.9, 9), (0.95, 10)])
def test_top_p_of_equal_tokens_keeps_the_first_that_reach_it(top_p, kept):
    """Sums of 0.1 fall a rounding short of 0.8; that does not call for a ninth token."""
    log_probs = sampling_log_probs(torch.zeros(1, 10), sampling(top_p=top_p))
    assert (log_probs[0] > -torch.inf).tolist() == [True] * kept + [False] * (10 - kept)


@pytest.mark.parametrize("temperature", [1e-310, 1e-9, 1e9])
def test_extreme_temperatures_give_a_distribution(temperature):
    log_probs = sampling_log_probs(torch.tensor([[1.0, 3.0, -torch.inf]]), sampling(temperature=temperature))
    expected = [0.5, 0.5, 0.0] if temperature > 1 else [0.0, 1.0, 0.0]
    assert log_probs.exp()[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_ties_at_the_edge_of_top_k_are_kept():
    log_probs = sampling_log_probs(torch.tensor([[1.0, 0.0, 0.0, -1.0]]), sampling(top_k=2))
    assert (log_probs[0] > -torch.inf).tolist() == [True, True, True, False]


@pytest.mark.parametrize("noise", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_no_noise_draws_a_token_without_probability(noise, changes):
    """Tokens at both ends of the vocabulary that cannot be drawn: padding columns, or what a rule forbids."""
    logits = torch.tensor([[-torch.inf, 1.0, 0.5, -torch.inf, 0.1, -torch.inf, -torch.inf]])
    tokens, log_probs = draw(logits, torch.tensor([noise], dtype=torch.float64), sampling(**changes))
    assert tokens.item() in (1, 2, 4) and log_probs.isfinite().all()


# ---- log-probs ----


@pytest.mark.parametrize(("kind", "log_prob"), [("processed", -0.060625), ("raw", -0.223144)])
def test_log_probs_at_temperature_one_half(kind, log_prob):
    """Logits [ln 4, 0]: 16/17 at temperature 0.5, 4/5 without it."""
    tokens, found = draw(LOG4, torch.tensor([0.5], dtype=torch.float64), sampling(temperature=0.5, log_probs=kind))
    assert tokens.item() == 0 and found.dtype == torch.float32
    assert found.item() == pytest.approx(log_prob, abs=1e-6)


def test_processed_log_probs_are_renormalised_over_what_is_kept():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    noise = torch.tensor([0.7], dtype=torch.float64)
    tokens, found = draw(logits, noise, sampling(top_k=2, log_probs="processed"))
    assert tokens.item() == 1 and found.item() == pytest.approx(math.log(0.375), abs=1e-6)
    assert draw(logits, noise, sampling(top_k=2, log_probs="raw"))[1].item() == pytest.approx(math.log(0.3), abs=1e-6)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_greedy_takes_the_likeliest_and_scores_it_at_temperature_one(kind):
    for noise in (0.0, 0.99):
        greedy = sampling(temperature=0.0, log_probs=kind)
        tokens, found = draw(LOG4, torch.tensor([noise], dtype=torch.float64), greedy)
        assert tokens.item() == 0 and found.item() == pytest.approx(math.log(0.8), abs=1e-6)


@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0], [0.0, 1e-20, 0.0]])
def test_the_greedy_token_is_one_that_top_p_keeps(logits):
    """Also where probabilities are equal in double precision, but logits are not."""
    greedy = sampling(temperature=0.0, top_p=0.3, log_probs="processed")
    tokens, found = draw(torch.tensor([logits]), torch.zeros(1, dtype=torch.float64), greedy)
    assert tokens.item() == max(range(3), key=logits.__getitem__) and found.item() == 0.0


@pytest.mark.parametrize(("changes", "said"), [
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"), ({"temperature": -1.0}, "temperature=-1.0: must be 0"),
    ({"top_p": 0.0}, "top_p=0.0: must be above 0"), ({"top_p": 1.1}, "top_p=1.1"), ({"top_k": -1}, "top_k=-1"),
    ({"log_probs": "other"}, "log_probs='other': must be raw or processed"),
    ({"temperature": math.nan}, "temperature=nan"), ({"temperature": math.inf}, "temperature=inf.*finite"),
    ({"stop": ("END", "")}, "stop=.'END', ''.: .*not empty"), ({"stop": "END"}, "stop='END': must be a tuple"),
])
def test_settings_that_mean_nothing_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        sampling(**changes)
