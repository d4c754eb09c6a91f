"""The log of a run: `metrics.jsonl`, one JSON object per step, and the same numbers for tensorboard."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rlhf_megatron.observe.metrics import Metric

FILE = "metrics.jsonl"
NOT_FINITE = "not_finite"  # key of a line: names and spellings of the values that JSON has no number for


class MetricsLog:
    """Writes one line per finished step to `folder/metrics.jsonl` and the same scalars to `folder/tensorboard`.

    `resume_step` is the last step that the run keeps (0 = a fresh run). On resume later lines, which the run is about
    to repeat, and a torn last line are removed; a fresh run that finds an old file moves it to `metrics.<n>.jsonl`
    instead of writing behind it. Every line is flushed when its step ends, so that a killed run keeps what it did.

    A value that is NaN or infinite is written as null, listed under "not_finite", and said on `stream`: JSON has no
    number for it, and a curve with a silent hole would hide the one step that matters.
    """

    def __init__(
        self, folder: str | os.PathLike[str], resume_step: int = 0, tensorboard: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / FILE
        self.stream = stream if stream is not None else sys.stderr
        _prepare(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _summary_writer(self.folder / "tensorboard", resume_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Metric | float | int | None]) -> dict[str, Any]:
        """Write the line of one step and return it. Metrics without a value are left out."""
        line: dict[str, Any] = {"step": step}
        bad: dict[str, str] = {}
        for name, metric in metrics.items():
            value = metric if metric is None or isinstance(metric, (int, float)) else metric.value
            if value is None or name == "step":
                continue
            if not math.isfinite(value):
                bad[name] = repr(float(value))
                value = None
            line[name] = value
        if bad:
            line[NOT_FINITE] = bad
            listed = ", ".join(f"{name} = {value}" for name, value in bad.items())
            print(f"warning: step {step}: not a finite number: {listed}", file=self.stream, flush=True)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name not in ("step", NOT_FINITE) and value is not None:
                    self._board.add_scalar(name, value, step)
            self._board.flush()
        return line

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        if not self._file.closed:
            self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's log, oldest first. A torn last line (the run was killed while writing) is left out.

    Raises FileNotFoundError when there is no log, ValueError naming file and line when an earlier line is not JSON.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no metrics log here; give a run's folder or its {FILE}")
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a JSON object ({error}); remove the line") from error
    return rows


def _prepare(path: Path, resume_step: int) -> None:
    if not path.exists():
        return
    if resume_step <= 0:
        number = 1
        while (kept := path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        path.rename(kept)
        return
    rows = [row for row in read(path) if row["step"] <= resume_step]
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fresh.replace(path)


def _summary_writer(folder: Path, resume_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(
            f"tensorboard cannot be imported ({error}); install it: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step > 0 else None)
