"""When a response ends: stop tokens of the model and stop strings of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TAIL = 8  # tokens decoded beyond those that a stop string can span


def stop_token_ids(model_dir: str | Path, tokenizer: Any = None) -> frozenset[int]:
    """Every EOS id that generation_config.json, config.json or the tokenizer names (each may name several)."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if path.is_file():
            found |= _ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    if tokenizer is not None:
        found |= _ids(tokenizer.eos_token_id)
    return frozenset(found)


def special_ids(tokenizer: Any, stop_strings: Sequence[str]) -> frozenset[int]:
    """Ids of the added tokens whose text is a stop string: decoding leaves special ones out, and never finds them."""
    added = {} if tokenizer is None or not stop_strings else tokenizer.added_tokens_decoder
    return frozenset(i for i, token in added.items() if token.content in stop_strings)


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


class Stopper:
    """Decides after every token of one row.

    Args:
        stop_ids: tokens that end a response.
        stop_strings: strings that do; they are looked for in the decoded text of the response, prompt excluded.
        decode: token ids -> text, special tokens left out.
        max_tokens: response tokens at most.
    """

    def __init__(self, stop_ids: Iterable[int], stop_strings: Sequence[str], decode: Callable[[list[int]], str] | None,
                 max_tokens: int) -> None:
        self.stop_ids, self.strings = frozenset(stop_ids), tuple(stop_strings)
        self.decode, self.max_tokens = decode, max_tokens
        if self.strings and decode is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer, and the model directory has none")
        # a token is at least one byte of text, so a stop string of n bytes ends within the last n tokens
        self.window = max((len(s.encode()) for s in self.strings), default=0) + TAIL

    def __call__(self, token_ids: list[int]) -> str | None:
        """The finish reason of a response that ends with its newest token, or None."""
        if token_ids[-1] in self.stop_ids:
            return "stop"
        if self.strings and self.decode is not None:
            text = self.decode(token_ids[-self.window :])
            if any(stop in text for stop in self.strings):
                return "stop"
        return "length" if len(token_ids) >= self.max_tokens else None
