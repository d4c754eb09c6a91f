"""What an algorithm is, and the parts that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_megatron.algorithms import kl
from rlhf_megatron.algorithms.masked import mean_and_variance, select
from rlhf_megatron.observe.metrics import Max, Mean, Metric, Min, Sum


class Loss(Protocol):
    """A loss of one role. `reads` names the fields that it needs, all ragged over the response."""

    reads: tuple[str, ...]

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Metric]]: ...


class Advantages(Protocol):
    """fields [B, R] of the whole global batch, the group of each row, algorithm section -> (new fields, metrics)."""

    def __call__(
        self, fields: Mapping[str, Tensor], group_ids: Sequence[int] | Tensor, config: Any,
        kl_coefficient: float | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Metric]]: ...


@dataclass(frozen=True)
class Algorithm:
    """An entry of the registry. Every `config` is the section `algorithm` of the configuration.

    needs(config)        which signals the loop must obtain: a frozenset of "reference" (ref_log_probs) and "values"
    advantages           pure; sees the whole global batch once per step; reads response_mask, token_level_scores,
                         old_log_probs, and what it needs; returns token_level_rewards, advantages and, with a critic,
                         returns, plus metrics. `kl_coefficient` is the controller's, by default the configured one
    actor_loss(config), critic_loss(config)    build the losses; critic_loss is None for algorithms without a critic
    """

    name: str
    needs: Callable[[Any], frozenset[str]]
    advantages: Advantages
    actor_loss: Callable[[Any], Loss]
    critic_loss: Callable[[Any], Loss] | None = None


def kl_needs(config: Any) -> frozenset[str]:
    """The reference is needed exactly when a KL term has a place, be its coefficient 0 (then KL is only measured)."""
    return frozenset() if config.kl.place == "none" else frozenset({"reference"})


def token_rewards(
    fields: Mapping[str, Tensor], config: Any, kl_coefficient: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """token_level_rewards [B, R]: the scores, after the KL penalty when KL is placed in the reward.

    kl/ref is the mean per valid token of the estimate between old_log_probs and ref_log_probs, wherever KL is placed;
    response/without_tokens counts rows without a valid token, which carry no reward and no gradient.
    """
    mask = fields["response_mask"]
    scores = fields["token_level_scores"]
    metrics: dict[str, Metric] = {"response/without_tokens": Sum((~mask.any(dim=1)).sum())}
    if config.kl.place == "none":
        return select(scores.float(), mask), metrics
    coefficient = config.kl.coefficient if kl_coefficient is None else kl_coefficient
    divergence = kl.estimate(fields["old_log_probs"], fields["ref_log_probs"], mask, config.kl.estimator)
    metrics["kl/ref"] = Mean(divergence.sum(dtype=torch.float64), mask.sum())
    metrics["kl/coefficient"] = Mean(coefficient)
    return kl.penalised(scores, divergence, mask, coefficient if config.kl.place == "reward" else 0.0), metrics


def reward_metrics(token_level_scores: Tensor, mask: Tensor) -> dict[str, Metric]:
    """reward/mean, std, min and max over rows of the raw reward (before any KL penalty), and response/length_mean.

    The deviation (of the population) is taken here, once, over the global batch: it cannot be merged afterwards.
    """
    rows = mask.shape[0]
    metrics: dict[str, Metric] = {"response/length_mean": Mean(mask.sum(), rows)}
    if rows == 0:
        return metrics
    totals = select(token_level_scores.double(), mask).sum(dim=1)
    _, variance = mean_and_variance(totals, torch.ones_like(totals, dtype=torch.bool))
    return metrics | {
        "reward/mean": Mean(totals.sum(), rows),
        "reward/std": Mean(variance.sqrt()),
        "reward/min": Min(totals.min()),
        "reward/max": Max(totals.max()),
    }


def log_prob_gap(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """rollout/log_prob_gap: mean |trainer's - sampler's log-prob| per valid token, and the largest.

    Both sides score the same tokens with the same weights, so it is numerical noise; when it grows, the sampler holds
    other weights than the trainer, or scores another distribution (temperature, truncation).
    """
    gap = (select(old_log_probs, mask) - select(rollout_log_probs, mask)).abs()
    tokens = mask.sum()
    return {
        "rollout/log_prob_gap": Mean(gap.sum(dtype=torch.float64), tokens),
        "rollout/log_prob_gap_max": Max(gap.max() if bool(tokens) else None),
    }
