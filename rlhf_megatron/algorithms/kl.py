"""KL estimators and the controllers of the KL coefficient.

Estimators: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. For a token sampled from
the policy, with r = log pi(token) - log pi_ref(token), all three estimate KL(pi || pi_ref):

    k1 = r                  unbiased, of either sign, high variance
    k2 = r^2 / 2            biased, never negative, its gradient is that of the true KL in expectation
    k3 = exp(-r) - 1 + r    unbiased, never negative

As a penalty KL is SUBTRACTED from the reward; as a loss term it is ADDED to the loss. Both lower the divergence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.masked import select

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8 is far beyond any useful ratio and far below float32's overflow at 88.7


def estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Per-token KL estimate [B, R], zero in masked places; differentiable in `log_probs`.

    `estimator` is "k1", "k2" or "k3". k3's log-ratio is clamped to +-20 before its exponential. A NaN on a valid token
    stays NaN.
    """
    r = select(log_probs, mask) - select(ref_log_probs, mask)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return r.square() / 2
    if estimator == "k3":
        r = r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.exp(-r) - 1 + r
    raise ValueError(f"KL estimator {estimator!r} is not known: algorithm.kl.estimator is one of k1, k2, k3")


def penalised(scores: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """token_level_rewards [B, R]: token_level_scores minus coefficient times per-token KL, zero in masked places."""
    return select(scores.float(), mask) - coefficient * select(kl.float(), mask)


class FixedController:
    """`coefficient` is that of the configuration, for the whole run."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float | None, rows: int) -> None:
        """Nothing to learn from the measured KL."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Nothing to restore: a changed configuration wins on resume."""


class AdaptiveController:
    """Moves `coefficient` so that the measured KL comes to a target. Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593.

        error = clip(kl / target - 1, -0.2, 0.2)        coefficient <- coefficient * (1 + error * rows / horizon)

    `target` is a KL per token, the unit of the metric kl/ref, and `horizon` is in rows (responses).
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0 or coefficient <= 0:
            raise ValueError(
                f"algorithm.kl: coefficient {coefficient}, target {target} and horizon {horizon} must all be above 0 "
                "for the adaptive controller, which multiplies the coefficient by a correction"
            )
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float | None, rows: int) -> None:
        """Correct the coefficient after a step of `rows` responses with mean `kl` per token; None changes nothing."""
        if kl is None or math.isnan(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # a step of more rows than the horizon must not flip the sign
        self.coefficient *= max(1.0 + error * rows / self.horizon, 0.1)

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        self.coefficient = float(state["coefficient"])


def controller(config: Any) -> FixedController | AdaptiveController:
    """The controller that `config` (the section algorithm.kl) asks for."""
    if config.controller == "fixed":
        return FixedController(config.coefficient)
    if config.controller == "adaptive":
        return AdaptiveController(config.coefficient, config.target, config.horizon)
    raise ValueError(f"KL controller {config.controller!r} is not known: algorithm.kl.controller is fixed or adaptive")
