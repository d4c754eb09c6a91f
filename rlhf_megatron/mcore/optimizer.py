"""The optimizer of a role: megatron-core's, with the learning rate of every update set here, and one way to step."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

SCHEDULES = ("constant", "linear", "cosine")


def is_distributed(settings: Any) -> bool:
    """Whether optimizer state is split over data-parallel ranks. Plain SGD has none to split."""
    return settings.name == "adam"


def learning_rate(settings: Any, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (0 is the first).

    Warm-up rises linearly, lr / warmup_steps at the first update, lr at the last warm-up update. From there
    `constant` stays; `linear` and `cosine` fall to min_lr, which they would reach at update `total_steps`.
    `settings` has lr, min_lr, schedule and warmup_steps.
    """
    if settings.schedule not in SCHEDULES:
        raise ValueError(f"optimizer.schedule={settings.schedule!r}: one of {', '.join(SCHEDULES)}")
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    share = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_lr + (settings.lr - settings.min_lr) * share


def build_optimizer(
    settings: Any, chunks: list[torch.nn.Module], groups: ProcessGroupCollection, dtype: torch.dtype
) -> MegatronOptimizer:
    """megatron-core's optimizer over DDP-wrapped model chunks: fp32, or bf16 with fp32 master weights.

    Collective over the pool's world. Norm weights and biases have no weight decay (megatron-core's rule).
    """
    if settings.name not in ("adam", "sgd"):
        raise ValueError(f"optimizer.name={settings.name!r}: adam or sgd")
    config = OptimizerConfig(
        optimizer=settings.name,
        lr=settings.lr,
        min_lr=settings.min_lr,  # mandatory for megatron-core; the rate itself is set before every update
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        sgd_momentum=0.0,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=is_distributed(settings),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=groups)
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is None:  # sgd: megatron-core calls it nevertheless when it loads a checkpoint
            part.init_state_fn = _no_state
        if not part.is_stub_optimizer:  # moments are zeros from the start: a role may be saved before its first update
            part.init_state_fn(part.optimizer, config)
    return optimizer


def apply_settings(optimizer: MegatronOptimizer, settings: Any, rate: float) -> None:
    """Set this update's rate, and the other settings too: a loaded checkpoint brings those of the run that saved it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
        if settings.name == "adam":
            group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float) -> tuple[float, bool]:
    """Clip by the global norm and step -> (norm before clipping, whether the step was made).

    The norm is summed over all ranks of the role, so a gradient that is not finite anywhere is seen by all of them:
    they skip the update together, and weights and optimizer state stay as they were. Collective over the role.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    if clip_grad > 0:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm, True


def _no_state(*_: Any) -> None:
    """State-free optimizers have nothing to allocate."""
