"""Three prompts of the demo with the answers before and after training, and where to look next.

    python examples/show_demo.py [runs/demo]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


def answers(model_dir: Path, prompts: list[str], tokens: int) -> list[str]:
    """Greedy answers by plain transformers, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        out.append(tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True))
    return out


def main() -> None:
    disable_progress_bar()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    train = config["data"]["train"]
    rows = Path(train if isinstance(train, str) else train[0]).read_text(encoding="utf-8").splitlines()
    prompts = list(dict.fromkeys(json.loads(row)[config["data"]["prompt_key"]] for row in rows))
    prompts = [prompts[0], prompts[len(prompts) // 2], prompts[-1]]
    tokens = config["generation"]["max_response_tokens"]
    before = answers(Path(config["actor"]["model"]), prompts, tokens)
    after = answers(folder / "hf" / "final", prompts, tokens)
    print(f"\n{'prompt':<12} {'before':<28} after")
    for prompt, old, new in zip(prompts, before, after, strict=True):
        print(f"{prompt!r:<12} {old!r:<28} {new!r}")
    rewards = [json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(f"\nmean reward: {rewards[0]:.2f} at the first step, {rewards[-1]:.2f} at the last of {len(rewards)}")
    print(f"picture      {folder}/report.png\ntensorboard  .venv/bin/tensorboard --logdir {folder}/tensorboard"
          f"\ncheckpoint   {folder}/hf/final (loads in transformers)")


if __name__ == "__main__":
    main()
