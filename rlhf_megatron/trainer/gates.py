"""What the numbers of a step say is wrong, in words: the metric, its limit, and the likely cause.

The first step of a fresh run has two known answers: nothing was trained yet, so the probability ratio of its first
update is 1, and the divergence from a reference that is the starting policy is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_megatron.observe.metrics import Metric

RATIO_TOLERANCE = 0.01  # of the largest ratio of any token in the first update
KL_TOLERANCE = 0.01  # nats per token


def warnings(values: Mapping[str, float], config: Any) -> Iterator[str]:
    """Of every step: a sampler that scores otherwise than the trainer, updates that were not made."""
    gap, limit = values.get("rollout/log_prob_gap"), config.trainer.log_prob_gap_limit
    if gap is not None and gap > limit:
        yield (
            f"rollout/log_prob_gap {gap:.3g} is above trainer.log_prob_gap_limit {limit:g}: the sampler does not score "
            "with the trainer's weights (stale ones after the last update, another temperature, or a lower precision)"
        )
    for role in ("actor", "critic"):
        if skipped := values.get(f"{role}/skipped"):
            yield (
                f"{role}/skipped {skipped:.0f}: the gradient of so many updates was not finite (a NaN in the rollout, "
                "or an overflow), or no token of theirs was valid; weights and optimizer state were left as they were"
            )


def first_step_warnings(
    values: Mapping[str, float], first_update: Mapping[str, Metric], config: Any
) -> Iterator[str]:
    """Of the first step of a fresh run. `first_update`: the metrics of the actor's first update, before training."""
    ratio = first_update.get("actor/ratio_max")
    if ratio is not None and ratio.value is not None and abs(ratio.value - 1.0) > RATIO_TOLERANCE:
        yield (
            f"actor/ratio_max {ratio.value:.4g} in the very first update, where it must be 1: the update does not "
            "score responses as log_probs did (another temperature, mask or layout of rows, or dropout), so every "
            "ratio of this run is wrong"
        )
    divergence, same = values.get("kl/ref"), config.reference.model in (None, config.actor.model)
    if divergence is not None and same and abs(divergence) > KL_TOLERANCE:
        yield (
            f"kl/ref {divergence:.4g} in the first step, where the reference is the policy and it must be 0: the two "
            "roles hold different weights or score differently (another checkpoint, dtype or temperature)"
        )
