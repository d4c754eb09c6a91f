"""RMS norm for the local layer spec, also under sequence parallelism. Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """x / rms(x) in fp32, back in x's dtype, times weight: the order of operations of the HF models.

    megatron-core's wrapper of torch's norm refuses sequence parallelism; this one tags its weight, so that its gradient
    is summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  megatron-core's tag
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)
