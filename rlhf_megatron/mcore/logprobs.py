"""Log-probabilities and entropy over a vocabulary that stays sharded, from hidden states, without a [N, V] tensor.

Positions are taken in chunks; a chunk's logits live only while it is worked on and are made again in backward. A rank
reduces its own columns to four numbers per position, and one all-gather joins the ranks' numbers for all positions:
one collective forward, one (the all-reduce of the hidden states' gradient) backward, however many chunks there are.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

# Stands for "this rank has no real column": exp of any difference to it is 0, and 0 times it is 0 (unlike -inf).
_NO_COLUMN = torch.finfo(torch.float32).min / 4


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 256,
    entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and entropy (nats) of each position's distribution, differentiable.

    Args:
        hidden: [N, H] final hidden states, the same on every rank of `group`. N may be 0.
        weight: [V / tp, H] this rank's rows of the output embedding: rank r holds tokens from r * V / tp on.
        targets: [N] int64 token ids, the same on every rank.
        group: the tensor-parallel group; None or a group of one rank: nothing is communicated.
        vocab_size: real tokens. Rows of `weight` from there on are padding and are never multiplied with, so nothing
            in them matters (not even NaN); their probability and gradient are exactly zero.
        temperature: logits are divided by it. 0 means greedy sampling, whose distribution has no density to score
            with; the responses are then scored at temperature 1.
        chunk: positions whose logits are in memory at once (about two fp32 [chunk, V / tp] tensors).
        entropy: False leaves it out (None is returned in its place).

    Returns:
        log_probs [N] fp32 and entropy [N] fp32, bit-equal on every rank of the group. A target outside the vocabulary
        has log-prob NaN, never a plausible number.

    Raises:
        ValueError: shapes that do not fit, a chunk below 1, or a temperature that is negative or not finite.

    The gradient of `hidden` is summed over the group (every rank gets all of it); that of `weight` is the rank's own.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature}: must be a finite number of at least 0 (0 scores like 1)")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one position must be worked on at a time")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V/tp, H]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must name one token per position of hidden "
                         f"{tuple(hidden.shape)}")
    size = 1 if group is None else group.size()
    if weight.shape[0] * size < vocab_size:
        raise ValueError(f"weight has {weight.shape[0]} rows on each of {size} ranks: too few for "
                         f"vocab_size={vocab_size}")
    log_probs, entropies = _VocabParallelLogProbs.apply(
        hidden, weight, targets, group if size > 1 else None, vocab_size, temperature or 1.0, chunk, entropy
    )
    return log_probs, entropies if entropy else None


class _VocabParallelLogProbs(torch.autograd.Function):
    """The function above; `temperature` is positive and `group` is None when there is nothing to communicate."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, group, vocab_size, temperature, chunk, entropy):
        first = 0 if group is None else group.rank() * weight.shape[0]
        real = min(max(vocab_size - first, 0), weight.shape[0])  # this rank's columns that are no padding
        rows = weight[:real]
        n = hidden.shape[0]
        # Per position, over this rank's columns x: max x, sum e^(x - max), sum e^(x - max) (x - max), x of the target.
        stats = torch.zeros(4, n, dtype=torch.float32, device=hidden.device)
        stats[0].fill_(_NO_COLUMN)
        if real:
            for begin in range(0, n, chunk):
                part = slice(begin, min(begin + chunk, n))
                x = _logits(hidden[part], rows, temperature)
                own, column = _columns(targets[part], first, real)
                stats[3, part] = torch.where(own, x.gather(1, column[:, None])[:, 0], 0.0)
                top = x.amax(1)
                stats[0, part] = top
                x.sub_(top[:, None])
                e = x.exp()
                stats[1, part] = e.sum(1)
                if entropy:
                    stats[2, part] = e.mul_(x).sum(1)
                del x, e
        every = stats[None]
        if group is not None and n:  # N is the same on every rank of the group: either all gather or none does
            parts = [torch.empty_like(stats) for _ in range(group.size())]
            dist.all_gather(parts, stats, group=group)
            every = torch.stack(parts)
        # Joined by the same arithmetic in the same order on every rank, hence bit-equal on every rank.
        tops, sums, moments, picked = every.unbind(1)  # [tp, N] each
        top = tops.amax(0)
        share = (tops - top).exp()
        log_sum = (share * sums).sum(0).log()
        log_probs = picked.sum(0) - top - log_sum
        log_probs.masked_fill_((targets < 0) | (targets >= vocab_size), math.nan)
        if entropy:  # H = sum p (lse - x), kept relative to each rank's maximum so that nothing large cancels
            per_rank = sums * ((top - tops) + log_sum) - moments
            entropies = (share * per_rank).sum(0) / log_sum.exp()
        else:
            entropies = torch.zeros_like(log_probs)
        ctx.save_for_backward(hidden, weight, targets, top, log_sum, entropies)
        ctx.group, ctx.first, ctx.real, ctx.temperature, ctx.chunk = group, first, real, temperature, chunk
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, top, log_sum, entropies = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        rows, n = weight[: ctx.real], hidden.shape[0]
        # fp32 sums over chunks whatever the model's dtype; rounded once at the end.
        hidden_grad = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if want_hidden else None
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(top)
        if ctx.real:
            for begin in range(0, n, ctx.chunk):
                part = slice(begin, min(begin + ctx.chunk, n))
                x = _logits(hidden[part], rows, ctx.temperature)
                x.sub_(top[part, None]).sub_(log_sum[part, None])  # now log p
                g = grad_log_probs[part, None]
                if grad_entropy is None:
                    d = x.exp_().mul_(-g)
                else:  # d(log p_target)/dx = onehot - p,  dH/dx = -p (log p + H)
                    p = x.exp()
                    d = x.add_(entropies[part, None]).mul_(-grad_entropy[part, None]).sub_(g).mul_(p)
                    del p
                own, column = _columns(targets[part], ctx.first, ctx.real)
                d.scatter_add_(1, column[:, None], torch.where(own[:, None], g, 0.0))
                d = d.div_(ctx.temperature).to(weight.dtype)
                if hidden_grad is not None:
                    hidden_grad[part] = d @ rows
                if weight_grad is not None:
                    _add_product(weight_grad[: ctx.real], d, hidden[part])
                del x, d
        if hidden_grad is not None:
            if ctx.group is not None and n:
                dist.all_reduce(hidden_grad, group=ctx.group)
            hidden_grad = hidden_grad.to(hidden.dtype)
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None, None


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """[c, H] x [v, H] -> fp32 [c, v], free to be written to. The product is in the weight's dtype, as in sampling."""
    x = (hidden.to(rows.dtype) @ rows.t()).float()
    return x if temperature == 1.0 else x.div_(temperature)


def _columns(targets: torch.Tensor, first: int, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets lie on this rank, and a column that is safe to index for every target."""
    column = targets - first
    return (column >= 0) & (column < real), column.clamp(0, real - 1)


def _add_product(total: torch.Tensor, d: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [v, H] fp32 += d^T [v, c] x hidden [c, H]."""
    if d.dtype == total.dtype:
        total.addmm_(d.t(), hidden.to(d.dtype))
    else:
        total.add_(d.t() @ hidden.to(d.dtype))
