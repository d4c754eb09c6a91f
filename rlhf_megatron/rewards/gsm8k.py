"""Reward `gsm8k`: grade-school maths word problems with the final answer written as "#### n".

The rows are those of the GSM8K data set (columns `question` and `answer`; the answer ends with "#### n"). A model is
shown the format by worked examples before the question (`data.shots`).
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.rewards.numbers import parse_number
from rlhf_megatron.rewards.registry import register

MARK = "####"


def final_answer(text: str) -> str | None:
    """What stands behind the last "####", up to the end of its line; None without one."""
    start = text.rfind(MARK)
    return None if start < 0 else text[start + len(MARK):].partition("\n")[0].strip()


def has_format(text: str) -> bool:
    """True when the last line is "#### n" with a number n, and nothing follows."""
    last_line = text.rstrip().rpartition("\n")[2].strip()
    return last_line.startswith(MARK) and parse_number(last_line[len(MARK):]) is not None


@register("gsm8k")
def gsm8k(
    prompts: list[str], responses: list[str], rows: list[dict[str, Any]], format_weight: float = 0.5
) -> list[dict[str, float]]:
    """format_weight * format + (1 - format_weight) * correct, each 0 or 1.

    `format`: the response ends with a line "#### n" with a number n. `correct`: what follows its last "####" equals the
    row's answer as a number ("$1,200.00" equals "1200"). Text is read by the grammar in numbers.py and never evaluated.

    Components: format, correct.
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        told = final_answer(str(row["answer"]))
        expected = parse_number(str(row["answer"]) if told is None else told)
        if expected is None:
            raise ValueError(f"column 'answer' ends with {str(row['answer'])[-40:]!r}, not with '#### n' or a number")
        given = final_answer(response)
        correct = float(given is not None and parse_number(given) == expected)
        form = float(has_format(response))
        reward = format_weight * form + (1.0 - format_weight) * correct
        scores.append({"reward": reward, "format": form, "correct": correct})
    return scores
