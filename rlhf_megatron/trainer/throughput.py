"""What a step computes, in model FLOPs, from true token counts, and the rates that follow: perf/* of every step.

Counted is what the step needs: every token of the rollout goes through the actor once to be generated (the prompt, too)
and once to be scored, once through the reference and the critic where the run has them, and three forwards' worth of
each trained model per update and epoch. Padding is not counted, nor is what recomputation repeats, so a better packing
shows as a higher rate (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.checks import active_roles
from rlhf_megatron.layouts.flops import TRAINING, ForwardFlops, forward_flops
from rlhf_megatron.layouts.hf import read_spec

# The part of `timing/<phase>` that computes with a model -> the role, and forwards per token that it is worth.
PHASES = {
    "generate": ("actor", 1),
    "old_log_prob": ("actor", 1),
    "reference": ("reference", 1),
    "values": ("critic", 1),
    "update_critic": ("critic", TRAINING),
    "update_actor": ("actor", TRAINING),
}


@dataclass(frozen=True)
class Tokens:
    """Sums over rows of L = prompt + response tokens: `total` of L, `squared` of L^2, `scored` of response tokens."""

    total: int = 0
    squared: int = 0
    scored: int = 0

    @classmethod
    def of(cls, prompts: Iterable[int], responses: Iterable[int], scored: int | None = None) -> Tokens:
        """From the lengths of each row's prompt and response [B]. `scored`: where not every response token is."""
        pairs = [(int(p), int(r)) for p, r in zip(prompts, responses, strict=True)]
        return cls(
            total=sum(p + r for p, r in pairs),
            squared=sum((p + r) ** 2 for p, r in pairs),
            scored=sum(r for _, r in pairs) if scored is None else scored,
        )

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.total + other.total, self.squared + other.squared, self.scored + other.scored)


def read_models(config: Any) -> dict[str, ForwardFlops]:
    """FLOPs of one forward of every role that the run has, from the config.json of its model folder.

    Raises:
        FileNotFoundError, ValueError: a folder without a usable config.json; the message names it.
    """
    models = {}
    for role in active_roles(config):
        spec = read_spec(getattr(config, role).model or config.actor.model)
        models[role] = forward_flops(spec, "value" if role == "critic" else "lm")
    return models


def phase_flops(models: Mapping[str, ForwardFlops], tokens: Mapping[str, Tokens]) -> dict[str, int]:
    """FLOPs of every phase, all ranks together.

    Args:
        models: FLOPs of one forward by role, from `read_models`.
        tokens: by the names of PHASES, what went through each phase; epochs and mini-batches summed. A phase that is
            not named (a replayed rollout is not generated), or whose role the run lacks, counts nothing.

    Raises:
        ValueError: a phase that does not compute with a model.
    """
    unknown = sorted(set(tokens) - set(PHASES))
    if unknown:
        raise ValueError(f"phase {unknown[0]!r} computes with no model; the phases are {', '.join(PHASES)}")
    found = {}
    for phase, (role, forwards) in PHASES.items():
        if phase in tokens and role in models:
            count = tokens[phase]
            found[phase] = forwards * models[role].total(count.total, count.squared, count.scored)
    return found


def rates(flops: int, tokens: int, seconds: float, ranks: int, peak_tflops: float | None) -> dict[str, float]:
    """The perf/* metrics of `tokens` (each counted once) and `flops` in `seconds` on `ranks` devices.

    Returns `perf/tokens_per_second`, `perf/tokens_per_second_per_gpu`, `perf/tflops_per_gpu` (10^12 operations per
    second and rank) and, where the device's peak is known, `perf/mfu` (model FLOPs utilisation, a fraction of it).
    """
    tflops = flops / seconds / ranks / 1e12
    found = {
        "perf/tokens_per_second": tokens / seconds,
        "perf/tokens_per_second_per_gpu": tokens / seconds / ranks,
        "perf/tflops_per_gpu": tflops,
    }
    return found | ({"perf/mfu": tflops / peak_tflops} if peak_tflops else {})
