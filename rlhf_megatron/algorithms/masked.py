"""Masked arithmetic. Masked means selected, never multiplied: inf or NaN under a mask must not matter.

`x * mask` turns a NaN or inf in a masked place into NaN, in the value and, through 0 * inf, in the gradient. `select`
puts a zero there before anything is computed from it, so that neither a value nor a gradient can leak out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x where `mask` (bool, the same shape) is true, zero elsewhere. The gradient to masked places is exactly zero."""
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is a bool tensor, got {mask.dtype}; write mask.bool() where it is made")
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of the valid entries, in float64, as a scalar tensor."""
    return select(x, mask).sum(dtype=torch.float64)


def mean_and_variance(x: Tensor, mask: Tensor, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance of all valid entries as float64 scalars, in two passes; (0, 0) when no entry is valid.

    The population variance (division by n) is the default; `unbiased` divides by n - 1, and is 0 for one entry.
    """
    count = mask.sum()
    mean = masked_sum(x, mask) / count.clamp(min=1)
    squares = masked_sum((x.double() - mean) ** 2, mask)
    return mean, squares / (count - int(unbiased)).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, unbiased: bool = False) -> Tensor:
    """x shifted and scaled to mean 0 and variance 1 over ALL valid entries given; zero in masked places. Any shape.

    The loop calls this on the global batch, so that the statistics never depend on how rows lie on ranks. No valid
    entry, or entries without spread, give zeros.
    """
    mean, variance = mean_and_variance(x, mask, unbiased)
    centred = select(x.double() - mean, mask)
    scaled = centred / variance.sqrt().clamp(min=1e-8)
    # entries without spread differ from their mean by rounding only; scaling that up would invent a signal
    flat = variance.sqrt() <= 1e-7 * mean.abs()
    return torch.where(flat, torch.zeros_like(scaled), scaled).to(x.dtype)
