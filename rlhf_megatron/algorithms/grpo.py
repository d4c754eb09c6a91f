"""Group relative policy optimisation: no critic, a response is compared with the others to the same prompt.
Shao et al. 2024, "DeepSeekMath", https://arxiv.org/abs/2402.03300."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.base import Algorithm, kl_needs, token_rewards
from rlhf_megatron.algorithms.losses import ActorLoss
from rlhf_megatron.algorithms.masked import select
from rlhf_megatron.algorithms.registry import register
from rlhf_megatron.observe.metrics import Mean, Metric

# Rewards of a group that differ by less than this share of their size differ by rounding, not by merit.
NO_SPREAD = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Sequence[int] | Tensor, normalize_by_std: bool = True, unbiased: bool = False
) -> tuple[Tensor, int, int]:
    """(advantages [B], groups without spread, groups) from one reward per row [B] and the id of each row's group.

    reward - mean of the group, divided by the group's standard deviation if `normalize_by_std`. The deviation is that
    of the population (division by n), so a group [1, 0, 0, 1] gives exactly [1, -1, -1, 1]; `unbiased` divides by
    n - 1. A group without spread gives exactly 0. Rows of a group may lie anywhere: the id alone says who belongs
    together. Raises ValueError for a group of one, which has nothing to be compared with.
    """
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if ids.shape != rewards.shape:
        raise ValueError(f"{tuple(ids.shape)} group ids for {tuple(rewards.shape)} rows: every row has one group id")
    unique, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    if bool((counts == 1).any()):
        alone = unique[counts == 1].tolist()
        raise ValueError(
            f"{len(alone)} of {len(unique)} groups have one response (group {alone[0]} first): a response is compared "
            "with the others of its group; set generation.samples_per_prompt to 2 or more"
        )
    exact = rewards.double()
    zeros = exact.new_zeros(len(unique))
    mean = zeros.index_add(0, group, exact) / counts
    centred = exact - mean[group]
    infinite = torch.full_like(zeros, torch.inf)
    low = infinite.scatter_reduce(0, group, exact, "amin")
    high = (-infinite).scatter_reduce(0, group, exact, "amax")
    spread = high - low > NO_SPREAD * torch.maximum(high.abs(), low.abs())
    if normalize_by_std:
        variance = zeros.index_add(0, group, centred.square()) / (counts - int(unbiased))
        centred = centred / torch.where(spread, variance, torch.ones_like(variance)).sqrt()[group]
    # a NaN reward has no spread by the comparison above; it must stay visible, not become a quiet zero
    keep = spread[group] | torch.isnan(exact)
    made = torch.where(keep, centred, torch.zeros_like(centred))
    return made.to(rewards.dtype), int((~spread).sum()), len(unique)


def advantages(
    fields: Mapping[str, Tensor], group_ids: Sequence[int] | Tensor, config: Any, kl_coefficient: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    """The group advantage of a row's total reward, on each of its valid tokens.

    Reads response_mask, token_level_scores, with a KL place old_log_probs and ref_log_probs; all [B, R]. Returns
    token_level_rewards and advantages (there is no critic, hence no returns). gamma, lam and whiten_advantages play no
    part. reward/zero_spread_groups is the fraction of groups that teach nothing.
    """
    mask = fields["response_mask"]
    rewards, metrics = token_rewards(fields, config, kl_coefficient)
    per_row, flat, groups = group_advantages(rewards.sum(dim=1), group_ids, config.normalize_by_std)
    metrics["reward/zero_spread_groups"] = Mean(flat, groups)
    made = select(per_row.unsqueeze(1).expand(mask.shape), mask)
    return {"token_level_rewards": rewards, "advantages": made}, metrics


register("grpo")(Algorithm("grpo", kl_needs, advantages, ActorLoss))
