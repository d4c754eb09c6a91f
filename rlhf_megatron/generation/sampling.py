"""Drawing tokens: noise that is a function of its coordinates, and the distribution that it is drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.generation.engine import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser. Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, step: int, sample_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
    """[B] float64 in [0, 1): one per (seed, step, sample id, position), whatever else is in the batch.

    The coordinates are absorbed one after the other, each by a step of splitmix64.
    """
    state = np.full(len(sample_ids), seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for coordinate in (step, sample_ids, positions):
            word = np.broadcast_to(np.asarray(coordinate, dtype=np.int64), state.shape).astype(np.uint64)
            state = _mix(_mix(state + _GOLDEN) ^ (word * _GOLDEN + np.uint64(0x632BE59BD9B4E019)))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sampling_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] float64 log-probabilities of the distribution that is sampled from; -inf where top-k or top-p cut.

    Ties at the edge of top-k are all kept. Top-p keeps the fewest tokens, likeliest first, whose sum reaches top_p
    (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751), after temperature and top-k; of equally likely
    ones the lower id comes first.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / (sampling.temperature or 1.0)  # no temperature makes inf - inf
    if 0 < sampling.top_k < scaled.shape[-1]:
        edge = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < edge, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[..., 0] = 0.0  # the likeliest token always stays
        enough = sampling.top_p * (1 - 1e-12)  # ten tokens of 0.1: eight of them reach 0.8, although they sum to less
        cut = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, before >= enough)
        scaled = scaled.masked_fill(cut, -torch.inf)
    return scaled.log_softmax(-1)


def draw(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] float32, from logits [B, V] and uniforms [B].

    By inverting the cumulative distribution in float64: a rounding difference of the logits, as another batch makes,
    changes a token only if the uniform lies within that difference of an edge.
    """
    log_probs = sampling_log_probs(logits, sampling)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        cumulative = log_probs.exp().cumsum(-1)
        # scaled by the actual total, so that rounding can never point beyond the last token that has probability
        target = noise.to(cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
        last = (log_probs > -torch.inf).long().cumsum(-1).argmax(-1)
        tokens = torch.minimum(tokens, last)
    if sampling.log_probs == "raw":
        log_probs = logits.double().log_softmax(-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
