"""PPO with a critic. Schulman et al. 2017, https://arxiv.org/abs/1707.06347; as used on language models by
Ouyang et al. 2022, https://arxiv.org/abs/2203.02155."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_megatron.algorithms.base import Algorithm, kl_needs, token_rewards
from rlhf_megatron.algorithms.gae import gae
from rlhf_megatron.algorithms.losses import ActorLoss, CriticLoss
from rlhf_megatron.algorithms.masked import mean_and_variance, select, whiten
from rlhf_megatron.algorithms.registry import register
from rlhf_megatron.observe.metrics import Mean, Metric


def needs(config: Any) -> frozenset[str]:
    """The critic's values always; the reference when KL has a place."""
    return kl_needs(config) | {"values"}


def advantages(
    fields: Mapping[str, Tensor], group_ids: Sequence[int] | Tensor, config: Any, kl_coefficient: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    """GAE over the penalised rewards, whitened over all valid tokens of the global batch if so configured.

    Reads response_mask, token_level_scores, values, with a KL place old_log_probs and ref_log_probs; all [B, R].
    Returns token_level_rewards, advantages and returns. Groups play no part. Returns are made before whitening: the
    critic learns returns in the units of the reward.
    """
    mask, values = fields["response_mask"], fields["values"]
    rewards, metrics = token_rewards(fields, config, kl_coefficient)
    made, returns = gae(rewards, values, mask, config.gamma, config.lam)
    # how much of the spread of the returns the critic foresaw: 1 - Var(returns - values) / Var(returns)
    _, left = mean_and_variance(returns - select(values.float(), mask), mask)
    _, whole = mean_and_variance(returns, mask)
    metrics["critic/explained_variance"] = Mean(whole - left, whole)
    if config.whiten_advantages:
        made = whiten(made, mask)
    return {"token_level_rewards": rewards, "advantages": made, "returns": returns}, metrics


register("ppo")(Algorithm("ppo", needs, advantages, ActorLoss, CriticLoss))
