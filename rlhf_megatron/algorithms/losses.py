"""Losses. Every loss is a sum over tokens divided by ONE global denominator of the mini-batch.

The caller computes the denominator once, over the whole mini-batch, before rows are split (`denominator`), and it comes
in as meta["denominator"]. So the sum of the losses of all micro-batches on all ranks is the loss of the mini-batch, and
the gradient is the same for every split. Nobody divides again. Log-ratios are selected under the mask and clamped
before they are exponentiated; a NaN on a valid token is not hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms import kl
from rlhf_megatron.algorithms.masked import select
from rlhf_megatron.observe.metrics import Max, Mean, Metric, Sum

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")


def denominator(response_mask: Tensor, aggregation: str) -> float:
    """What the loss of these rows is divided by: valid tokens for token_mean, rows with a valid token otherwise.

    `response_mask` is [B, R] bool. The denominators of the parts of a batch add up to that of the batch. 0 means that
    there is nothing to learn from: the caller skips the update, on all ranks.
    """
    _check(aggregation)
    if aggregation == "token_mean":
        return float(response_mask.sum())
    return float(response_mask.any(dim=1).sum())


def aggregate(per_token: Tensor, mask: Tensor, aggregation: str) -> Tensor:
    """The numerator of the loss, a scalar: the sum over tokens, or over each row's mean for seq_mean_token_mean."""
    _check(aggregation)
    per_token = select(per_token, mask)
    if aggregation == "seq_mean_token_mean":
        return (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    return per_token.sum()


def ppo_clip(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, negated, per token, and where clipping binds (bool). Shapes [B, R].

    Schulman et al. 2017, equation 7, https://arxiv.org/abs/1707.06347; two separate bounds as in DAPO,
    https://arxiv.org/abs/2503.14476:   -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).
    Clipping binds where it changes the minimum: ratio above 1 + clip_high with A > 0, below 1 - clip_low with A < 0.
    The log-ratio is clamped to +-20, where the gradient is zero.
    """
    ratio = torch.exp(log_ratio.clamp(-kl.LOG_RATIO_LIMIT, kl.LOG_RATIO_LIMIT))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    binds = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))
    return loss, binds


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of the values, per token, and where clipping binds (bool). Shapes [B, R].

    max((V - R)^2, (V_clipped - R)^2) / 2 with V clipped to old_values +- clip; clip 0 means no clipping.
    """
    error = (values - returns).square()
    if clip <= 0:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    clipped_error = (clipped - returns).square()
    # inside the clip the two errors differ by rounding only, which is no clipping
    binds = ((values - old_values).abs() > clip) & (clipped_error > error)
    return torch.maximum(error, clipped_error) / 2, binds


class ActorLoss:
    """Clipped policy loss, plus KL to the reference when it is placed in the loss, minus the entropy bonus.

    Call: `loss(outputs, fields, meta) -> (scalar, metrics)`, with outputs["log_probs"] (and "entropy", needed for a
    bonus, reported whenever it is there) and the fields of `reads`, all [b, R]; meta["denominator"] is the
    mini-batch's, meta["kl_coefficient"] overrides the configured coefficient (adaptive controller).
    """

    def __init__(self, config: Any) -> None:
        _check(config.loss_aggregation)
        self.config = config
        self.kl_in_loss = config.kl.place == "loss"
        self.reads: tuple[str, ...] = ("response_mask", "old_log_probs", "advantages")
        if self.kl_in_loss:
            self.reads += ("ref_log_probs",)

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Metric]]:
        config, mask = self.config, fields["response_mask"]
        raw = outputs["log_probs"]
        log_probs = select(raw, mask)
        log_ratio = log_probs - select(fields["old_log_probs"], mask)
        advantages = select(fields["advantages"], mask)

        per_token, binds = ppo_clip(log_ratio, advantages, config.clip_low, config.clip_high)
        numerator = aggregate(per_token, mask, config.loss_aggregation)
        policy = numerator.detach()
        kl_term = entropy_term = None
        if self.kl_in_loss:
            divergence = kl.estimate(raw, fields["ref_log_probs"], mask, config.kl.estimator)
            kl_term = aggregate(divergence, mask, config.loss_aggregation)
            numerator = numerator + meta.get("kl_coefficient", config.kl.coefficient) * kl_term
        if config.entropy_coefficient != 0.0 or "entropy" in outputs:
            entropy = select(outputs["entropy"], mask)
            entropy_term = entropy.detach().sum()
            if config.entropy_coefficient != 0.0:
                bonus = aggregate(entropy, mask, config.loss_aggregation)
                numerator = numerator - config.entropy_coefficient * bonus
        loss = _divide(numerator, meta["denominator"], mask)

        with torch.no_grad():
            limited = log_ratio.clamp(-kl.LOG_RATIO_LIMIT, kl.LOG_RATIO_LIMIT)
            ratio = torch.exp(limited)
            zero = torch.zeros((), device=mask.device)
            parts = {
                "tokens": mask.sum(),
                "rows": mask.any(dim=1).sum(),
                "loss": numerator,
                "policy": policy,
                "clipped": (binds & mask).sum(),
                "clamped": ((log_ratio.abs() > kl.LOG_RATIO_LIMIT) & mask).sum(),
                "kl_old": select(ratio - 1 - limited, mask).sum(),
                "ratio_max": torch.where(mask, ratio, zero).max() if mask.numel() else zero,
                "not_finite": (~torch.isfinite(log_probs) & mask).sum(),
                "kl": zero if kl_term is None else kl_term,
                "entropy": zero if entropy_term is None else entropy_term,
            }
            sums = _to_numbers(parts)
        tokens = sums["tokens"]
        weight = tokens if config.loss_aggregation == "token_mean" else sums["rows"]
        metrics: dict[str, Metric] = {
            "actor/loss": Mean(sums["loss"], weight),
            "actor/policy_loss": Mean(sums["policy"], weight),
            "actor/clip_fraction": Mean(sums["clipped"], tokens),
            "actor/clamped_fraction": Mean(sums["clamped"], tokens),
            "actor/kl_old": Mean(sums["kl_old"], tokens),
            "actor/ratio_max": Max(sums["ratio_max"] if tokens else None),
            "actor/not_finite_tokens": Sum(sums["not_finite"]),
        }
        if kl_term is not None:
            metrics["actor/kl_loss"] = Mean(sums["kl"], weight)
        if entropy_term is not None:
            metrics["actor/entropy"] = Mean(sums["entropy"], tokens)
        return loss, metrics


class CriticLoss:
    """Clipped value loss. Aggregated like the actor's, because a mini-batch carries one denominator for both.

    Call: `loss(outputs, fields, meta) -> (scalar, metrics)` with outputs["values"] [b, R], the fields of `reads`, and
    meta["denominator"].
    """

    reads: tuple[str, ...] = ("response_mask", "values", "returns")

    def __init__(self, config: Any) -> None:
        _check(config.loss_aggregation)
        self.config = config

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Metric]]:
        config, mask = self.config, fields["response_mask"]
        values = select(outputs["values"], mask)
        old_values, returns = select(fields["values"], mask), select(fields["returns"], mask)
        per_token, binds = value_clip(values, old_values, returns, config.value_clip)
        numerator = aggregate(per_token, mask, config.loss_aggregation)
        loss = _divide(numerator, meta["denominator"], mask)
        with torch.no_grad():
            sums = _to_numbers({
                "tokens": mask.sum(),
                "rows": mask.any(dim=1).sum(),
                "loss": numerator,
                "clipped": (binds & mask).sum(),
                "values": values.sum(),
                "not_finite": (~torch.isfinite(values) & mask).sum(),
            })
        tokens = sums["tokens"]
        return loss, {
            "critic/loss": Mean(sums["loss"], tokens if config.loss_aggregation == "token_mean" else sums["rows"]),
            "critic/clip_fraction": Mean(sums["clipped"], tokens),
            "critic/values_mean": Mean(sums["values"], tokens),
            "critic/not_finite_tokens": Sum(sums["not_finite"]),
        }


def _divide(numerator: Tensor, by: float, mask: Tensor) -> Tensor:
    if by > 0:
        return numerator / by
    if bool(mask.any()):
        raise ValueError(
            f"the loss denominator is {by}, but {int(mask.sum())} tokens are valid: compute it with losses.denominator "
            "over the whole mini-batch before its rows are split"
        )
    return numerator  # a sum over nothing: exactly 0, with zero gradients


def _to_numbers(parts: Mapping[str, Tensor]) -> dict[str, float]:
    # one transfer for all sums: a .item() for each would stop the device once per metric and micro-batch
    stacked = torch.stack([part.detach().double().reshape(()) for part in parts.values()])
    return dict(zip(parts, stacked.tolist(), strict=True))


def _check(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"loss aggregation {aggregation!r} is not known: algorithm.loss_aggregation is one of "
            + ", ".join(AGGREGATIONS)
        )
