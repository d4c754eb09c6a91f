"""Reward `sums`: short right answers to "What is x + y?"."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.rewards.numbers import last_number, parse_number
from rlhf_megatron.rewards.registry import register


@register("sums")
def sums(
    prompts: list[str], responses: list[str], rows: list[dict[str, Any]], lengths: list[int], max_tokens: int = 32
) -> list[dict[str, float]]:
    """correct * (0.5 + 0.5 * (1 - length / max_tokens)); 0.1 for a wrong answer that holds a digit; else 0.

    The answer is the last number of the response; it is right when it equals the row's column `answer`. Shortness is
    multiplied by correctness: added to it, it teaches empty answers. A `length` (tokens) above `max_tokens` counts as
    that.

    Components: correct (0 or 1).
    """
    scores = []
    for response, row, length in zip(responses, rows, lengths, strict=True):
        answer = parse_number(str(row["answer"]))
        if answer is None:
            raise ValueError(f"column 'answer' is {row['answer']!r:.60}, not a number")
        correct = last_number(response) == answer
        if correct:
            reward = 0.5 + 0.5 * (1.0 - min(length, max_tokens) / max_tokens)
        else:
            reward = 0.1 if any(char in "0123456789" for char in response) else 0.0
        scores.append({"reward": reward, "correct": float(correct)})
    return scores
