"""What a generation engine promises, and the types that go in and out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    max_tokens: response tokens at most, EOS included.
    temperature: 0 means greedy: the likeliest token, no noise.
    top_p, top_k: keep the smallest set of tokens with probability top_p, the top_k likeliest (1.0 and 0 = off).
    stop: strings that end a response; the token that completes one is its last. One that is the text of a special token
        stands for that token.
    log_probs: "raw" = log-softmax of the model's logits; "processed" = of the distribution that was sampled from
        (tempered, then renormalised over what top-p and top-k keep; greedy counts as temperature 1). The trainer scores
        at the sampling temperature, so away from temperature 1 only "processed" ones are comparable with its own.
    seed, step: with the sample id and the position, all that the noise depends on.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    log_probs: Literal["raw", "processed"] = "raw"
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above, and finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
            ("log_probs", self.log_probs in ("raw", "processed"), "raw or processed"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"sampling {name}={getattr(self, name)!r}: must be {rule}")


@dataclass(frozen=True)
class Completion:
    """One response. A stop token is part of it, so that stopping can be learnt; what comes after it never is.

    token_ids and log_probs have equal length, at least 1. finish_reason: "stop" (a stop token or string) or "length".
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


class GenerationEngine(Protocol):
    """An engine in the trainer's process. The trainer writes into `tensors()`, then calls finish_weights, reset_cache.

    Order around a rollout: wake, weights, finish_weights, reset_cache, generate, sleep.
    """

    weights_version: int

    def tensors(self) -> dict[str, Tensor]:
        """The engine's weights by its local names: storage to be written in place."""

    def finish_weights(self, changed: list[str]) -> None:
        """Recompute what the engine derives from the weights that changed; counts weights_version up."""

    def generate(self, prompts: list[list[int]], sample_ids: list[int], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in order. A sample id is unique within a step; it decides the noise."""

    def reset_cache(self) -> None:
        """Forget everything computed with earlier weights."""

    def sleep(self) -> None:
        """Free what is needed only while generating."""

    def wake(self) -> None:
        """Make ready to take weights and to generate."""
