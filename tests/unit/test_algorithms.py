"""Advantages and KL: exact values of reported faults, and properties over random masks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_megatron.algorithms import base, kl, registry
from rlhf_megatron.algorithms.gae import gae
from rlhf_megatron.algorithms.grpo import group_advantages
from rlhf_megatron.algorithms.masked import mean_and_variance, select, whiten


def settings(**changes):
    kl_section = SimpleNamespace(place="none", estimator="k3", coefficient=0.0, controller="fixed", target=0.1,
                                 horizon=1000)
    for key in [key for key in changes if key.startswith("kl_")]:
        setattr(kl_section, key.removeprefix("kl_"), changes.pop(key))
    base = {"gamma": 1.0, "lam": 0.95, "clip_low": 0.2, "clip_high": 0.2, "value_clip": 0.2, "entropy_coefficient": 0.0,
            "normalize_by_std": True, "whiten_advantages": False, "loss_aggregation": "token_mean", "kl": kl_section}
    return SimpleNamespace(**{**base, **changes})


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=0
    )


# ---- GAE: values after the end play no part ----


@pytest.mark.parametrize("behind", [7.0, 1e6, math.nan, math.inf])
def test_gae_ignores_what_stands_behind_the_last_token(behind):
    values = torch.tensor([[0.5, 0.4, 0.3, behind, behind]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, behind, behind]])
    mask = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    close(advantages, [[0.43675, 0.565, 0.7, 0, 0]])
    close(returns, [[0.93675, 0.965, 1.0, 0, 0]])


def test_gae_decay_crosses_a_gap_once():
    """A tool's tokens between two actions are skipped: as if the row were [first, third]."""
    rewards, values = torch.tensor([[0.0, math.nan, 1.0]]), torch.tensor([[0.5, math.nan, 0.3]])
    advantages, returns = gae(rewards, values, torch.tensor([[True, False, True]]), gamma=0.9, lam=0.95)
    last = 1.0 - 0.3
    first = 0.0 + 0.9 * 0.3 - 0.5 + 0.9 * 0.95 * last
    close(advantages, [[first, 0, last]])
    close(returns, [[first + 0.5, 0, 1.0]])


def gae_one_row(rewards, values, mask, gamma, lam):
    advantages, following, running = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            running = rewards[t] + gamma * following - values[t] + gamma * lam * running
            advantages[t], following = running, values[t]
    return advantages


def test_gae_equals_the_recursion_on_random_masks():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 17, 23, generator=generator)
    mask = torch.rand(17, 23, generator=generator) < 0.6
    mask[0], mask[1] = False, True
    advantages, _ = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    for row in range(17):
        close(advantages[row], gae_one_row(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), 0.97, 0.9))
    empty, _ = gae(rewards[:, :0], values[:, :0], mask[:, :0], 1.0, 1.0)
    assert empty.shape == (17, 0)


# ---- whitening: one mean and variance of all valid tokens ----

TWO_RANKS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, math.nan]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("unbiased", "variance", "expected"),
    [(False, 12.5, [-0.848528, -0.565685, -0.282843, 1.697056]),
     (True, 16.6667, [-0.734847, -0.489898, -0.244949, 1.469694])],
)
def test_whitening_uses_global_statistics(unbiased, variance, expected):
    x, mask = TWO_RANKS
    mean, measured = mean_and_variance(x, mask, unbiased)
    close(mean, 4.0)
    close(measured, variance, atol=1e-4)
    white = whiten(x, mask, unbiased)
    close(white[mask], expected)
    assert white[~mask].tolist() == [0.0, 0.0]
    along = whiten(x.reshape(1, 6), mask.reshape(1, 6), unbiased)  # the same tokens as one row: no row is special
    close(along.reshape(2, 3), white)


def test_whitening_without_tokens_or_spread_gives_zeros():
    x = torch.tensor([[math.nan, 5.0]])
    assert whiten(x, torch.zeros_like(x, dtype=torch.bool)).tolist() == [[0.0, 0.0]]
    assert whiten(x, torch.tensor([[False, True]])).tolist() == [[0.0, 0.0]]
    same = torch.full((3, 7), 0.1)
    assert whiten(same, torch.ones_like(same, dtype=torch.bool)).abs().max() == 0
    small = torch.tensor([1e-6, -1e-6])  # small is not without spread
    close(whiten(small, torch.ones(2, dtype=torch.bool)), [1.0, -1.0])


def test_whitening_one_fully_masked_rank_leaves_the_other_its_own_statistics():
    x, mask = TWO_RANKS[0], torch.tensor([[1, 1, 1], [0, 0, 0]]).bool()
    close(whiten(x, mask)[0], [-1.224745, 0.0, 1.224745])


def test_a_mask_is_bool():
    with pytest.raises(TypeError, match=r"mask\.bool"):
        select(torch.ones(2), torch.ones(2))


# ---- groups ----


def test_group_of_four():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert group_advantages(rewards, [5, 5, 5, 5])[0].tolist() == [1.0, -1.0, -1.0, 1.0]
    close(group_advantages(rewards, [5, 5, 5, 5], unbiased=True)[0], [0.866025, -0.866025, -0.866025, 0.866025])
    close(group_advantages(rewards, [5, 5, 5, 5], normalize_by_std=False)[0], [0.5, -0.5, -0.5, 0.5])


def test_group_without_spread_is_exactly_zero():
    for value in (1.0, 0.1, 0.0, -3.3):
        made, flat, groups = group_advantages(torch.full((4,), value), [0, 0, 0, 0])
        assert made.tolist() == [0.0] * 4 and (flat, groups) == (1, 1)
    made, flat, groups = group_advantages(torch.tensor([0.1, 0.1 + 1e-8, 0.5, 0.7]), [0, 0, 1, 1])
    close(made, [0, 0, -1, 1])
    assert (flat, groups) == (1, 2)


def test_groups_are_found_by_id_not_by_position():
    rewards, ids = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.tensor([7, 2, 7, 2])
    made = group_advantages(rewards, ids)[0]
    assert made.sign().tolist() == [-1, -1, 1, 1]
    generator = torch.Generator().manual_seed(3)
    rewards, ids = torch.randn(24, generator=generator), torch.arange(24) % 6
    order = torch.randperm(24, generator=generator)
    close(group_advantages(rewards[order], ids[order])[0], group_advantages(rewards, ids)[0][order], atol=1e-6)


def test_group_of_one_is_refused_with_the_key():
    with pytest.raises(ValueError, match=r"group 4 first.*generation\.samples_per_prompt"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), [1, 4, 1])


def test_nan_reward_stays_visible_in_its_group():
    made = group_advantages(torch.tensor([math.nan, 1.0, 0.0, 1.0]), [0, 0, 1, 1])[0]
    assert math.isnan(made[0]) and made[2:].tolist() == [-1.0, 1.0]


# ---- KL ----

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_estimators(estimator, value):
    logp, ref = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[-1.5]], dtype=torch.float64)
    close(kl.estimate(logp, ref, ONE, estimator), [[value]])
    assert kl.estimate(logp, logp, ONE, estimator).item() == 0
    if estimator == "k3":
        close(kl.estimate(ref, logp, ONE, estimator), [[0.148721]])


@pytest.mark.parametrize(("estimator", "logp", "ref", "slope"), [
    ("k3", -1.0, -1.5, 0.393469), ("k3", -1.5, -1.0, -0.648721), ("k2", -1.0, -1.5, 0.5), ("k3", -1.0, -1.0, 0.0),
    ("k2", -1.0, -1.0, 0.0),
])
def test_kl_slope_points_away_from_the_reference(estimator, logp, ref, slope):
    at = torch.tensor([[logp]], requires_grad=True)
    kl.estimate(at, torch.tensor([[ref]]), ONE, estimator).sum().backward()
    close(at.grad, [[slope]])


def test_kl_is_deaf_to_masked_places_and_large_ratios():
    logp = torch.tensor([[-1.0, math.nan, -300.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, math.inf, 0.0]])
    mask = torch.tensor([[True, False, True]])
    value = kl.estimate(logp, ref, mask, "k3")
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logp.grad).all()
    assert value[0, 1] == 0 and logp.grad[0, 1] == 0
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl.estimate(logp, ref, mask, "k4")


def test_adaptive_controller_steers_and_resumes():
    section = settings(kl_controller="adaptive", kl_coefficient=0.1, kl_target=0.05).kl
    controller = kl.controller(section)
    controller.update(0.5, rows=100)  # far above the target: the error is clipped to 0.2
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    state = controller.state()
    controller.update(0.0, rows=100)
    controller.update(None, rows=100)
    controller.update(math.nan, rows=100)
    assert controller.coefficient == pytest.approx(0.1 * 1.02 * 0.98)
    again = kl.controller(section)
    again.load_state(state)
    again.update(0.0, rows=100)
    assert again.coefficient == controller.coefficient
    with pytest.raises(ValueError, match="coefficient 0"):
        kl.controller(settings(kl_controller="adaptive", kl_coefficient=0.0).kl)
    fixed = kl.controller(settings(kl_coefficient=0.3).kl)
    fixed.update(9.0, 100)
    fixed.load_state(fixed.state())
    assert fixed.coefficient == 0.3


# ---- whole algorithms ----


def fields(**changes):
    base = {
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.5, math.nan]]),
        "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, math.nan]]),
        "ref_log_probs": torch.tensor([[-1.5, -1.0], [-1.0, math.nan]]),
        "values": torch.tensor([[0.2, 0.4], [0.1, math.nan]]),
    }
    return {**base, **changes}


def test_kl_in_the_reward_is_subtracted():
    config = settings(kl_place="reward", kl_estimator="k1", kl_coefficient=0.1)
    new, metrics = registry.get("grpo").advantages(fields(), [0, 0], config)
    close(new["token_level_rewards"], [[-0.05, 1.0], [0.5, 0.0]])
    assert metrics["kl/ref"].value == pytest.approx(0.5 / 3) and metrics["kl/coefficient"].value == 0.1
    new, _ = registry.get("grpo").advantages(fields(), [0, 0], config, kl_coefficient=1.0)
    close(new["token_level_rewards"], [[-0.5, 1.0], [0.5, 0.0]])
    new, _ = registry.get("grpo").advantages(fields(), [0, 0], settings(kl_place="loss", kl_coefficient=0.1))
    close(new["token_level_rewards"], [[0.0, 1.0], [0.5, 0.0]])


def test_grpo_spreads_the_row_advantage_over_valid_tokens():
    new, metrics = registry.get("grpo").advantages(fields(), torch.tensor([3, 3]), settings())
    assert new["advantages"].tolist() == [[1.0, 1.0], [-1.0, 0.0]]
    assert "returns" not in new
    assert metrics["reward/zero_spread_groups"].value == 0
    _, metrics = registry.get("grpo").advantages(
        fields(token_level_scores=torch.tensor([[0.0, 1.0], [1.0, 5.0]])), [3, 3], settings()
    )
    assert metrics["reward/zero_spread_groups"].value == 1


def test_ppo_makes_returns_in_units_of_the_reward_and_whitens_only_advantages():
    plain, metrics = registry.get("ppo").advantages(fields(), [0, 1], settings())
    close(plain["advantages"], [[0.2 + 0.95 * 0.6, 0.6], [0.4, 0.0]])
    close(plain["returns"], [[0.2 + 0.95 * 0.6 + 0.2, 1.0], [0.5, 0.0]])
    white, _ = registry.get("ppo").advantages(fields(), [0, 1], settings(whiten_advantages=True))
    mask = fields()["response_mask"]
    assert torch.equal(white["returns"], plain["returns"])
    close(white["advantages"], whiten(plain["advantages"], mask))
    got, old = plain["returns"][mask].double(), fields()["values"][mask].double()
    close(metrics["critic/explained_variance"].value, 1 - (got - old).var() / got.var())


def test_a_batch_without_a_valid_token_gives_zeros_and_a_count():
    nothing = fields(response_mask=torch.zeros(2, 2, dtype=torch.bool))
    for name, config in (("ppo", settings(whiten_advantages=True)), ("grpo", settings())):
        new, metrics = registry.get(name).advantages(nothing, [0, 0], config)
        assert all(bool((value == 0).all()) for value in new.values())
        assert metrics["response/without_tokens"].value == 2
        assert all(m.value is None or math.isfinite(m.value) for m in metrics.values())


def test_reward_metrics_and_gap_ignore_masked_places():
    report = base.reward_metrics(fields()["token_level_scores"], fields()["response_mask"])
    assert {name: m.value for name, m in report.items()} == {
        "response/length_mean": 1.5, "reward/mean": 0.75, "reward/std": 0.25, "reward/min": 0.5, "reward/max": 1.0
    }
    gap = base.log_prob_gap(fields()["old_log_probs"], fields()["ref_log_probs"], fields()["response_mask"])
    assert gap["rollout/log_prob_gap"].value == pytest.approx(0.5 / 3)
    assert gap["rollout/log_prob_gap_max"].value == 0.5
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    gap = base.log_prob_gap(fields()["old_log_probs"], fields()["ref_log_probs"], nothing)
    assert all(m.value is None for m in gap.values())


def test_needs():
    for place in ("none", "reward", "loss"):
        reference = frozenset() if place == "none" else frozenset({"reference"})
        assert registry.get("grpo").needs(settings(kl_place=place)) == reference
        assert registry.get("ppo").needs(settings(kl_place=place)) == reference | {"values"}
    assert registry.get("grpo").critic_loss is None


def test_registry_names_the_nearest():
    assert {"grpo", "ppo"} <= set(registry.names())
    with pytest.raises(ValueError, match=r"'grpp'.*grpo, ppo.*did you mean 'grpo'"):
        registry.get("grpp")
    with pytest.raises(ValueError, match="already registered"):
        registry.register("ppo")(registry.Algorithm("ppo", lambda c: frozenset(), lambda *a: ({}, {}), lambda c: None))
