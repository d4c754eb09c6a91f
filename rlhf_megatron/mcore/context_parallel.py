"""What context-parallel ranks have each made of their positions, put together on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def whole(values: torch.Tensor, here: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[n] values of this rank's positions -> [count], the same on every rank of the group.

    Args:
        here: [n] which of the `count` positions are this rank's; each is some rank's, and only one's.

    Every rank goes on to compute the same loss from the same numbers, so backward keeps this rank's part of the
    gradient and sums nothing; gradients of weights are partial sums then, which the data-parallel reduction adds up.
    """
    return _Whole.apply(values, here, count, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, here: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(here)
        everywhere = values.new_zeros(count).index_copy(0, here, values)
        if count:
            dist.all_reduce(everywhere, group=group)
        return everywhere

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (here,) = ctx.saved_tensors
        return gradients[0].index_select(0, here), None, None, None
