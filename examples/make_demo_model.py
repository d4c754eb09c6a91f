"""Make what the demo needs: a tiny llama-type HF checkpoint, a byte-level tokenizer, and prompts for two tasks.

    python examples/make_demo_model.py --out build/demo

Everything is made from a seed; nothing is fetched. The folder then holds model/, copy_train.jsonl and
class_train.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

LETTERS = "abcdefgh"
CLASSES = {"lower": "abcdefghijklmnopqrstuvwxyz", "upper": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "digit": "0123456789"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three control tokens: <pad> 256, <bos> 257, <eos> 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """0.85 million parameters: hidden 128, four layers, four heads over two KV heads."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))


def copy_rows() -> list[dict[str, str]]:
    """"aaa:": the answer repeats the letter."""
    return [{"prompt": f"{letter * 3}:", "letter": letter} for letter in LETTERS for _ in range(8)]


def class_rows() -> list[dict[str, str]]:
    """"abc:", "QX:", "07:": the answer stays in the prompt's class of characters."""
    rows = []
    for name, characters in CLASSES.items():
        for first, second in itertools.islice(itertools.permutations(characters, 2), 0, 64):
            rows.append({"prompt": f"{first}{second}:", "class": name})
    return rows


def make(out: Path, seed: int = 1) -> None:
    """Write the folder. Made aside and renamed, so that an interrupted run leaves nothing that looks whole."""
    out = Path(out)
    aside = out.with_name(out.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(aside / "model")
    make_model(tokenizer, seed).save_pretrained(aside / "model")
    for name, rows in (("copy", copy_rows()), ("class", class_rows())):
        (aside / f"{name}_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


def main() -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)
    print(f"demo model and prompts: {arguments.out}")


if __name__ == "__main__":
    main()
