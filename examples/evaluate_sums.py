"""Greedy accuracy of HF checkpoints on the 64 short sums, in plain transformers.

    python examples/evaluate_sums.py build/smollm2 runs/smollm/hf/final

Exit code 1 when the last one answers fewer than --at-least (a share, default 0) correctly.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from make_sums_data import sums
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

SYSTEM = "Answer shortly."


@torch.no_grad()
def accuracy(directory: str, max_tokens: int = 32) -> tuple[int, list[str]]:
    """(number of sums whose last number in the greedy answer is right, all answers)."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = sums()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}],
            tokenize=False, add_generation_prompt=True,
        )
        for row in rows
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    made = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)
    answers = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
    right = 0
    for row, answer in zip(rows, answers, strict=True):
        numbers = re.findall(r"\d+", answer)
        right += bool(numbers) and numbers[-1] == row["answer"]
    return right, answers


def main() -> int:
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--at-least", type=float, default=0.0)
    arguments = parser.parse_args()
    right = 0
    for directory in arguments.directories:
        right, answers = accuracy(directory)
        print(f"{directory}: correct {right}/{len(answers)} ({right / len(answers):.0%}), for example {answers[:3]}",
              flush=True)
    return 0 if right >= arguments.at_least * 64 else 1


if __name__ == "__main__":
    raise SystemExit(main())
