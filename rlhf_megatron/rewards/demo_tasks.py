"""Rewards `copy` and `class`: tasks that a tiny model with random weights learns within minutes on a CPU.

Both give partial credit for every right character, so that a random policy already sees differences between its
samples.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.rewards.registry import register

_CLASSES = {
    "lower": frozenset("abcdefghijklmnopqrstuvwxyz"),
    "upper": frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "digit": frozenset("0123456789"),
}


def _task(prompt: str) -> str:
    """The prompt's text before ":"."""
    task, colon, _ = prompt.strip().partition(":")
    if not task or not colon:
        raise ValueError(f"prompt {prompt!r:.60} is not of the form 'aaa:'")
    return task


def _fraction(response: str, right: frozenset[str], length: int) -> float:
    """Right characters among the first `length`, over `length`: a shorter response earns less, a longer one no more."""
    return sum(char in right for char in response[:length]) / length


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"reward.arguments.length is {length}, must be at least 1")


@register("copy")
def copy(prompts: list[str], responses: list[str], rows: list[dict[str, Any]], length: int = 12) -> list[float]:
    """Prompt "aaa:" -> repeat the letter: how many of the first `length` characters are it, as a fraction of `length`.

    `length` should be `generation.max_response_tokens` when a token is a character.
    """
    _check_length(length)
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        task = _task(prompt)
        if len(set(task)) != 1:
            raise ValueError(f"prompt {prompt!r:.60} is not one letter repeated, as in 'aaa:'")
        rewards.append(_fraction(response, frozenset(task[0]), length))
    return rewards


@register("class")
def character_class(
    prompts: list[str], responses: list[str], rows: list[dict[str, Any]], length: int = 12
) -> list[float]:
    """Prompt "x:" -> characters of that class (lower, upper, digit; ASCII): the fraction as in `copy`.

    The prompt names a class, or shows characters of one: "abc:", "QX:", "07:".
    """
    _check_length(length)
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        task = _task(prompt)
        right = _CLASSES.get(task) or next((c for c in _CLASSES.values() if set(task) <= c), None)
        if right is None:
            raise ValueError(f"prompt {prompt!r:.60} neither names nor shows a class of {sorted(_CLASSES)}")
        rewards.append(_fraction(response, right, length))
    return rewards
