"""Generalised advantage estimation. Schulman et al. 2015, "High-dimensional continuous control using generalized
advantage estimation", https://arxiv.org/abs/1506.02438."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.masked import select


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, R] float32, zero in masked places.

        delta_t = r_t + gamma * V_next(t) - V_t     A_t = delta_t + gamma * lam * A_next(t)     return_t = A_t + V_t

    `rewards`, `values`: [B, R]; `mask`: [B, R] bool. "next" is the next VALID token of the row: tokens under the mask
    (padding, or tool output inside a response) are not actions, contribute neither reward nor value, and the decay
    gamma * lam crosses such a gap once, however long it is. After the last valid token the value is 0, for a response
    that ended and for one that was cut at the length limit alike: a truncated response is not bootstrapped, because
    the critic never learns what would follow the limit, and an answer that does not fit is as finished as any other.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} "
            "must have one shape"
        )
    if mask.numel() == 0:
        return torch.zeros_like(rewards, dtype=torch.float32), torch.zeros_like(values, dtype=torch.float32)
    rewards, values = select(rewards.float(), mask), select(values.float(), mask)
    if bool((mask[:, 1:] > mask[:, :-1]).any()):  # a valid token behind a masked one: a gap, or padding on the left
        index = mask.cumsum(dim=1).sub_(1).clamp_(min=0)  # [B, R]: where a valid token lies once its row has no gaps
        advantages = _scan(_pack(rewards, index), _pack(values, index), gamma, lam).gather(1, index)
    else:
        advantages = _scan(rewards, values, gamma, lam)
    advantages = select(advantages, mask)
    return advantages, advantages + values


def _pack(x: Tensor, index: Tensor) -> Tensor:
    """The valid tokens of each row moved to its left, zeros behind them. Masked tokens of x are 0 and add nothing."""
    return torch.zeros_like(x).scatter_add_(1, index, x)


def _scan(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages of rows without gaps, zero behind their end. The only sequential work is one fused multiply-add of [B]
    numbers per position, on rows of a transposed copy, where these numbers lie side by side."""
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)  # "next" is one to the right, and 0 behind the last valid token
    advantages = deltas.t().contiguous()
    positions = advantages.unbind(0)
    for t in range(len(positions) - 2, -1, -1):
        positions[t].add_(positions[t + 1], alpha=gamma * lam)
    return advantages.t().contiguous()
