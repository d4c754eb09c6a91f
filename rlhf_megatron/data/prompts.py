"""RLHFDataset: prompts in the order of seed and epoch, resumable to the row."""

from __future__ import annotations

import hashlib
import logging
import sys
from typing import Any

import numpy as np
import torch

from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.data.rows import DataError, read_rows
from rlhf_megatron.data.tokenizer import PromptEncoder, PromptError, Tokenizer

__all__ = ["DataError", "RLHFDataset"]

_LOG = logging.getLogger(__name__)
_SHOWN_PROBLEMS = 5
_PROGRESS_FROM_ROWS = 5000


class RLHFDataset:
    """The prompts of `config.data`, encoded once and handed out in batches.

    Every row is checked: what is not usable is an error with file and row (`bad_rows: stop`), or skipped and counted
    (`skip`). A prompt above `max_prompt_tokens` is dropped, cut on its `left` (its end stays) or `right` (its beginning
    stays), or an `error`. A cut does not look at the chat template: it may remove the beginning of it.

    Order: with `shuffle`, every epoch is its own permutation, a function of (seed, epoch) only; else the files' order.

    Attributes:
        tokenizer: as given.
        counts: rows, kept, bad, overlong_dropped, overlong_cut, control_strings (prompts that hold such a text).
        problems: the first few reasons for skipped rows.

    Raises:
        DataError: a bad or overlong row under a strict policy; no row is left.
    """

    def __init__(self, config: Any, tokenizer: Tokenizer, seed: int) -> None:
        self.config, self.tokenizer, self.seed = config, tokenizer, int(seed)
        self.counts = dict.fromkeys(
            ("rows", "kept", "bad", "overlong_dropped", "overlong_cut", "control_strings"), 0)
        self.problems: list[str] = []
        self.rows: list[dict[str, Any]] = []
        encode = PromptEncoder(tokenizer, config.chat, config.system, config.prompt_key, config.shots)
        ids = self._encode_all(encode)
        if not self.rows:
            said = "; ".join(self.problems)
            raise DataError(f"data.train {config.train}: no usable row of {self.counts['rows']} ({self._said_counts()})"
                            + (f": {said}" if said else ""))
        self.prompts = Ragged.from_list(ids)
        self.fingerprint = hashlib.sha256(
            self.prompts.values.numpy().tobytes() + self.prompts.lengths.numpy().tobytes()).hexdigest()[:16]
        self.epoch, self.offset = 0, 0
        self._order: tuple[int, torch.Tensor] | None = None
        if self.counts["kept"] < self.counts["rows"] or self.counts["control_strings"]:
            _LOG.warning("data.train %s: %s%s", config.train, self._said_counts(),
                         "".join(f"\n  {problem}" for problem in self.problems))

    def __len__(self) -> int:
        """Usable rows, which is one epoch."""
        return len(self.rows)

    def check_batch(self, n: int) -> None:
        """Raises DataError when batches of `n` prompts are not possible: `drop_last` and fewer usable rows than `n`."""
        if n < 1:
            raise DataError(f"trainer.prompts_per_step is {n}, must be at least 1")
        if self.config.drop_last and len(self) < n:
            raise DataError(
                f"data.train has {len(self)} usable rows ({self._said_counts()}), fewer than trainer.prompts_per_step "
                f"{n}, and data.drop_last is true: lower prompts_per_step, add rows, or set data.drop_last=false"
            )

    def next(self, n: int, wrap: bool | None = None) -> DataProto:
        """The next prompts: `prompts` (ragged int64), `row` (the data-set row, a dict), `group_id` (0 .. rows - 1).

        Args:
            n: prompts wanted.
            wrap: True: exactly `n`, going on over the end of an epoch, over as many epochs as it takes. False: a batch
                never spans two epochs; the remainder of an epoch is a smaller batch, or is left out with `drop_last`.
                None: True with `drop_last` (so that no batch is short, and no prompt is left out either), else False.

        Never returns an empty batch. Raises DataError for n < 1, and for `wrap=False` with `drop_last` and fewer rows
        than `n`.
        """
        if n < 1:
            raise DataError(f"next: {n} prompts wanted, must be at least 1")
        wrap = self.config.drop_last if wrap is None else wrap
        if not wrap:
            self.check_batch(n)
            left = len(self) - self.offset
            if self.config.drop_last and left < n:
                self.epoch, self.offset, left = self.epoch + 1, 0, len(self)
            n = min(n, left)
        parts = []
        while n:
            part = self._epoch_order()[self.offset: self.offset + n]
            parts.append(part)
            n -= len(part)
            self.offset += len(part)
            if self.offset == len(self):  # normalised: the end of an epoch is the beginning of the next
                self.epoch, self.offset = self.epoch + 1, 0
        index = torch.cat(parts)
        rows = [self.rows[i] for i in index.tolist()]
        return DataProto({"prompts": self.prompts.reorder(index)}, {"row": rows, "group_id": list(range(len(rows)))})

    def state(self) -> dict[str, Any]:
        """Where the next prompt stands, as JSON-able data: epoch and offset, and what they are valid for."""
        return {"epoch": self.epoch, "offset": self.offset, "seed": self.seed, "rows": len(self),
                "shuffle": bool(self.config.shuffle), "fingerprint": self.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. DataError when the prompts, the seed or the order are others now."""
        now = self.state()
        differing = [f"{key}: saved {state.get(key)!r}, now {now[key]!r}"
                     for key in ("seed", "rows", "shuffle", "fingerprint") if state.get(key) != now[key]]
        if differing:
            raise DataError("the saved position belongs to other prompts: " + "; ".join(differing))
        epoch, offset = int(state["epoch"]), int(state["offset"])
        if epoch < 0 or not 0 <= offset < len(self):
            raise DataError(f"saved position epoch {epoch}, offset {offset} is outside the {len(self)} rows")
        self.epoch, self.offset = epoch, offset

    def _epoch_order(self) -> torch.Tensor:
        """[rows] int64: the order of the current epoch."""
        if self._order is None or self._order[0] != self.epoch:
            if self.config.shuffle:
                # RandomState's stream is frozen by numpy's compatibility policy: a resumed run sees the same order.
                key = [self.seed & 0xFFFFFFFF, (self.seed >> 32) & 0xFFFFFFFF, self.epoch]
                order = torch.from_numpy(np.random.RandomState(key).permutation(len(self)).astype(np.int64))
            else:
                order = torch.arange(len(self))
            self._order = (self.epoch, order)
        return self._order[1]

    def _encode_all(self, encode: PromptEncoder) -> list[list[int]]:
        """Reads, checks and encodes every row; keeps the usable ones in `self.rows` and returns their ids."""
        kept: list[list[int]] = []
        for where, row, problem in _with_progress(read_rows(self.config.train)):
            self.counts["rows"] += 1
            ids: list[int] = []
            if row is not None:
                try:
                    ids = encode(row)
                except PromptError as error:
                    problem = str(error)
                except RecursionError:
                    problem = "the prompt is nested too deeply"
            if problem is not None:
                self._bad(f"{where}: {problem}")
                continue
            self.counts["control_strings"] += encode.holds_control_strings(row)
            fitted = self._fit(ids, where)
            if fitted is not None:
                kept.append(fitted)
                self.rows.append(row)
        self.counts["kept"] = len(kept)
        return kept

    def _bad(self, problem: str) -> None:
        if self.config.bad_rows == "stop":
            raise DataError(f"{problem} (data.bad_rows=skip leaves such rows out)")
        self.counts["bad"] += 1
        if len(self.problems) < _SHOWN_PROBLEMS:
            self.problems.append(problem)

    def _fit(self, ids: list[int], where: str) -> list[int] | None:
        limit, policy = self.config.max_prompt_tokens, self.config.overlong
        if len(ids) <= limit:
            return ids
        if policy == "error":
            raise DataError(f"{where}: the prompt has {len(ids)} tokens, above data.max_prompt_tokens {limit} "
                            "(data.overlong: drop, left or right accepts it)")
        if policy == "drop":
            self.counts["overlong_dropped"] += 1
            return None
        self.counts["overlong_cut"] += 1
        return ids[-limit:] if policy == "left" else ids[:limit]

    def _said_counts(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


def _with_progress(rows: Any) -> Any:
    """The rows, with a count on a terminal once there are many; a log file sees nothing."""
    for number, row in enumerate(rows, start=1):
        if number % _PROGRESS_FROM_ROWS == 0 and sys.stderr.isatty():
            print(f"\rencoding prompts: {number}", end="", file=sys.stderr, flush=True)
        yield row
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
