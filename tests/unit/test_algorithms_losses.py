"""Losses: one global denominator, selection under the mask, clamped ratios, metrics that merge."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_megatron.algorithms.losses import AGGREGATIONS, ActorLoss, CriticLoss, denominator, value_clip
from rlhf_megatron.observe import metrics
from test_algorithms import close, settings


def run(loss, outputs, fields, **meta):
    """The scalar, the gradient of the first output, the metrics."""
    name, leaf = next(iter(outputs.items()))
    leaf = leaf.clone().requires_grad_()
    meta.setdefault("denominator", denominator(fields["response_mask"], "token_mean"))
    scalar, report = loss({**outputs, name: leaf}, fields, meta)
    scalar.backward()
    return scalar.item(), leaf.grad, report


def policy(log_ratio, advantages, mask=None):
    log_ratio = torch.tensor([log_ratio])
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else torch.tensor([mask]).bool()
    fields = {"response_mask": mask, "old_log_probs": torch.zeros_like(log_ratio),
              "advantages": torch.tensor([advantages])}
    return {"log_probs": log_ratio}, fields


@pytest.mark.parametrize(
    ("estimator", "term", "slope"), [("k1", 0.05, 0.1), ("k2", 0.0125, 0.05), ("k3", 0.0106531, 0.0393469)]
)
def test_kl_in_the_loss_is_added(estimator, term, slope):
    config = settings(kl_place="loss", kl_estimator=estimator, kl_coefficient=0.1)
    fields = {"response_mask": torch.ones(1, 1, dtype=torch.bool), "old_log_probs": torch.tensor([[-1.0]]),
              "advantages": torch.zeros(1, 1), "ref_log_probs": torch.tensor([[-1.5]])}
    loss = ActorLoss(config)
    assert set(loss.reads) == set(fields)
    value, gradient, report = run(loss, {"log_probs": torch.tensor([[-1.0]])}, fields)
    assert value == pytest.approx(term, rel=1e-4)
    close(gradient, [[slope]])  # a gradient step lowers the log-prob, towards the reference
    assert report["actor/kl_loss"].value == pytest.approx(10 * term, rel=1e-4)
    value, _, _ = run(loss, {"log_probs": torch.tensor([[-1.0]])}, fields, kl_coefficient=0.2)
    assert value == pytest.approx(2 * term, rel=1e-4)


def test_token_mean_of_two_unequal_responses():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    fields = {"response_mask": mask, "old_log_probs": torch.zeros(2, 6),
              "advantages": torch.tensor([[1.0], [-0.5]]).expand(2, 6)}
    loss = ActorLoss(settings())
    whole, gradient, report = run(loss, {"log_probs": torch.zeros(2, 6)}, fields)
    assert whole == pytest.approx(0.125)
    parts = [run(loss, {"log_probs": torch.zeros(1, 6)}, {k: v[i : i + 1] for k, v in fields.items()}, denominator=8.0)
             for i in range(2)]
    assert sum(part[0] for part in parts) == pytest.approx(0.125)
    close(torch.cat([part[1] for part in parts]), gradient, atol=0)
    assert metrics.merge([part[2] for part in parts])["actor/loss"].value == pytest.approx(0.125)
    assert report["actor/loss"].value == pytest.approx(0.125)


def random_case(rows=6, length=9):
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[2] = False
    draw = lambda: torch.randn(rows, length, generator=generator, dtype=torch.float64)  # noqa: E731
    fields = {"response_mask": mask, "old_log_probs": draw(), "advantages": draw(), "ref_log_probs": draw(),
              "values": draw(), "returns": draw()}
    return fields, draw()


SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [2], [0, 3, 4]])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(aggregation):
    """In float64, through a parameter, with KL and entropy in the loss: every split gives the same to 1e-10."""
    fields, noise = random_case()
    config = settings(kl_place="loss", kl_coefficient=0.3, entropy_coefficient=0.1, loss_aggregation=aggregation)
    actor, critic = ActorLoss(config), CriticLoss(config)
    meta = {"denominator": denominator(fields["response_mask"], aggregation)}
    results = []
    for split in SPLITS:
        weight = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        reports, total = [], 0.0
        for rows in split:
            part = {name: value[rows] for name, value in fields.items()}
            for loss in (actor, critic):
                out = weight * noise[rows]
                scalar, report = loss({"log_probs": out, "entropy": out.square(), "values": out}, part, meta)
                scalar.backward()
                reports.append(report)
                total += scalar.item()
        results.append((total, weight.grad.item(), metrics.values(metrics.merge(reports))))
    for total, gradient, report in results[1:]:
        assert total == pytest.approx(results[0][0], abs=1e-10)
        assert gradient == pytest.approx(results[0][1], abs=1e-10)
        assert report == pytest.approx(results[0][2], abs=1e-10)
    assert results[0][2]["actor/loss"] + results[0][2]["critic/loss"] == pytest.approx(results[0][0], abs=1e-10)


def test_aggregations_of_two_rows():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    assert [denominator(mask, name) for name in AGGREGATIONS] == [4.0, 2.0, 2.0]
    fields = {"response_mask": mask, "old_log_probs": torch.zeros(3, 3),
              "advantages": torch.tensor([[-4.0], [-2.0], [9.0]]).expand(3, 3)}
    for name, expected in zip(AGGREGATIONS, [10 / 4, (4 + 2) / 2, (4 + 6) / 2], strict=True):
        value, _, _ = run(ActorLoss(settings(loss_aggregation=name)), {"log_probs": torch.zeros(3, 3)}, fields,
                          denominator=denominator(mask, name))
        assert value == pytest.approx(expected)
    with pytest.raises(ValueError, match="algorithm.loss_aggregation"):
        denominator(mask, "mean")


def test_nothing_valid_is_zero_with_zero_gradient_and_no_metric_value():
    outputs, fields = policy([math.nan, 1000.0], [math.nan, 1.0], mask=[0, 0])
    value, gradient, report = run(ActorLoss(settings()), outputs, fields)
    assert value == 0 and gradient.tolist() == [[0.0, 0.0]]
    assert metrics.values(report) == {"actor/not_finite_tokens": 0.0}
    with pytest.raises(ValueError, match="denominator is 0"):
        run(ActorLoss(settings()), {"log_probs": torch.zeros(1, 1)}, policy([0.0], [1.0])[1], denominator=0.0)


# ---- infinity times zero ----


def test_huge_ratio_with_zero_advantage():
    outputs, fields = policy([200.0, 0.0], [0.0, 1.0])
    value, gradient, report = run(ActorLoss(settings()), outputs, fields)
    assert value == pytest.approx(-0.5)
    assert gradient[0, 0] == 0 and gradient[0, 1] == pytest.approx(-0.5)
    assert report["actor/clamped_fraction"].value == 0.5


@pytest.mark.parametrize("masked", [1000.0, -1000.0, math.nan, math.inf, -math.inf])
def test_masked_token_has_no_say(masked):
    outputs, fields = policy([0.1, masked, -0.1], [1.0, masked, 2.0], mask=[1, 0, 1])
    value, gradient, report = run(ActorLoss(settings()), outputs, fields)
    outputs, fields = policy([0.1, -0.1], [1.0, 2.0])
    alone, alone_gradient, alone_report = run(ActorLoss(settings()), outputs, fields)
    assert value == alone and metrics.values(report) == metrics.values(alone_report)
    assert gradient[0, [0, 2]].tolist() == alone_gradient[0].tolist() and gradient[0, 1] == 0


@pytest.mark.parametrize("huge", [1000.0, -1000.0])
def test_huge_ratio_of_either_sign_of_advantage_stays_finite(huge):
    for advantage in (1.0, -1.0):
        outputs, fields = policy([huge, 0.0], [advantage, 1.0])
        value, gradient, report = run(ActorLoss(settings()), outputs, fields)
        assert math.isfinite(value) and gradient[0, 0] == 0
        assert all(math.isfinite(m.value) for m in report.values())


def test_a_true_nan_is_not_hidden():
    outputs, fields = policy([math.nan, 0.0], [1.0, 1.0])
    value, _, report = run(ActorLoss(settings()), outputs, fields)
    assert math.isnan(value)  # the engine refuses the step; the count says how many tokens are to blame
    assert report["actor/not_finite_tokens"].value == 1
    assert math.isnan(report["actor/loss"].value)


# ---- clipping ----


def test_clipping_counts_where_it_binds():
    outputs, fields = policy([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)], [1.0, -1.0, 1.0, -1.0])
    value, gradient, report = run(ActorLoss(settings()), outputs, fields)
    assert report["actor/clip_fraction"].value == 0.5
    assert value == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    close(gradient, [[0.0, 1.5 / 4, -0.5 / 4, 0.0]])
    parts = [run(ActorLoss(settings()), {"log_probs": outputs["log_probs"][:, cut]},
                 {name: field[:, cut] for name, field in fields.items()}, denominator=4.0)
             for cut in (slice(0, 1), slice(1, 4))]
    assert metrics.merge(part[2] for part in parts)["actor/clip_fraction"].value == 0.5


def test_clip_bounds_are_separate():
    outputs, fields = policy([math.log(1.25), math.log(0.75)], [1.0, -1.0])
    value, _, report = run(ActorLoss(settings(clip_low=0.1, clip_high=0.3)), outputs, fields)
    assert value == pytest.approx((-1.25 + 0.9) / 2) and report["actor/clip_fraction"].value == 0.5


def test_entropy_bonus_lowers_the_loss_and_is_reported():
    outputs, fields = policy([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], mask=[1, 1, 0])
    outputs["entropy"] = torch.tensor([[1.0, 2.0, math.nan]])
    value, _, report = run(ActorLoss(settings(entropy_coefficient=0.1)), outputs, fields)
    assert value == pytest.approx(-0.15) and report["actor/entropy"].value == pytest.approx(1.5)
    value, _, report = run(ActorLoss(settings()), outputs, fields)
    assert value == 0 and report["actor/entropy"].value == pytest.approx(1.5)


def test_value_loss_clips_and_ignores_masked_places():
    fields = {"response_mask": torch.tensor([[1, 1, 0]]).bool(), "values": torch.tensor([[0.0, 0.0, math.nan]]),
              "returns": torch.tensor([[1.0, 0.1, math.inf]])}
    outputs = {"values": torch.tensor([[0.5, 0.1, math.nan]])}
    value, gradient, report = run(CriticLoss(settings(value_clip=0.2)), outputs, fields)
    assert value == pytest.approx((0.8**2 / 2 + 0.0) / 2)  # 0.5 is clipped to 0.2: the larger error counts
    assert gradient.tolist() == [[0.0, 0.0, 0.0]]
    assert report["critic/clip_fraction"].value == 0.5
    value, gradient, _ = run(CriticLoss(settings(value_clip=0.0)), outputs, fields)
    assert value == pytest.approx(0.5**2 / 2 / 2)
    close(gradient, [[-0.25, 0.0, 0.0]])
    per_token, binds = value_clip(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), clip=0.5)
    assert per_token.item() == 0.5 and not binds.item()  # clipping would lower the error: it does not bind
