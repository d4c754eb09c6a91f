"""Adam with decoupled weight decay in the state layout of apex's and transformer-engine's FusedAdam, for CPU.

The step count lives in the param group, and a parameter's state holds only `exp_avg` and `exp_avg_sq`. megatron-core's
distributed optimizer saves and reshards that layout; with torch's AdamW, which keeps a `step` tensor per parameter, its
resume is wrong. Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """The signature of FusedAdam, as far as megatron-core uses it."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        adam_w_mode: bool = True, **unused: Any,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented here")
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures here
        """One update of every parameter that has a gradient. `closure` is not supported."""
        if closure is not None:
            raise ValueError("a closure is not supported: megatron-core makes the gradients itself")
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
            correction2 = math.sqrt(1 - beta2**step) if group["bias_correction"] else 1.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                gradient, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                if group["weight_decay"]:
                    parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(mean, square.sqrt().div_(correction2).add_(group["eps"]), value=-lr / correction1)
