"""Reward `format_length`: an example of a reward with components, for responses of a given form and length."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.rewards.registry import register


@register("format_length")
def format_length(
    prompts: list[str],
    responses: list[str],
    rows: list[dict[str, Any]],
    lengths: list[int],
    starts: str = "",
    ends: str = ".",
    target_tokens: int = 32,
) -> list[dict[str, float]]:
    """format * (0.5 + 0.5 * closeness).

    `format` is 1 when the stripped response is longer than `starts` + `ends`, begins with the one and ends with the
    other; `closeness` falls from 1 at `target_tokens` tokens to 0 at none, and at twice as many. Plain text comparison:
    a regular expression on a model's text can take exponential time.

    Components: format, closeness.
    """
    if target_tokens < 1:
        raise ValueError(f"reward.arguments.target_tokens is {target_tokens}, must be at least 1")
    scores = []
    for response, length in zip(responses, lengths, strict=True):
        text = response.strip()
        inside = len(text) > len(starts) + len(ends)
        form = float(inside and text.startswith(starts) and text.endswith(ends))
        closeness = max(0.0, 1.0 - abs(length - target_tokens) / target_tokens)
        scores.append({"reward": form * (0.5 + 0.5 * closeness), "format": form, "closeness": closeness})
    return scores
