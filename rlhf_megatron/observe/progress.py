"""What a user sees while a run works: a live line on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rlhf_megatron.observe.metrics import Metric

# what a line shows, in this order, when the step reports it: metric name, label, format
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("kl/ref", "kl", ".4f"),
    ("actor/loss", "loss", ".4f"),
    ("response/length_mean", "length", ".1f"),
    ("perf/tokens_per_second", "tokens/s", ",.0f"),
)


def step_line(step: int, total: int, metrics: Mapping[str, Metric | float | None]) -> str:
    """One line about a finished step: its numbers, then the seconds of each phase."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for name, label, form in SHOWN:
        value = _value(metrics.get(name))
        if value is not None:
            parts.append(f"{label} {value:{form}}")
    phases = [
        f"{name.removeprefix('timing/')} {value:.1f}s"
        for name, metric in metrics.items()
        if name.startswith("timing/") and (value := _value(metric)) is not None and name != "timing/step"
    ]
    if phases:
        parts.append(" ".join(phases))
    return "  ".join(parts)


class Progress:
    """Progress of a run of `total` steps.

    On a terminal finished steps scroll by and the last line is live: how far the run is, the phase it is in and for
    how long, and the time left. Elsewhere only the line of each finished step is printed. Use as a context manager;
    `phase` fits `Timers(on_start=...)`. `start` is the number of steps already done (resume).
    """

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = self._before = start
        self.stream = stream if stream is not None else sys.stdout
        self.live: Any = None
        self._phase = "starting"
        self._begin = self._phase_begin = time.monotonic()

    def __enter__(self) -> Progress:
        self._begin = self._phase_begin = time.monotonic()
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(
                get_renderable=self._render, console=Console(file=self.stream), refresh_per_second=4, transient=True
            )
            self.live.start()
            atexit.register(self.close)  # the live line hides the cursor: a run that dies must give it back
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the live line away. Safe to call twice."""
        if self.live is not None:
            self.live.stop()
            self.live = None
            atexit.unregister(self.close)

    def phase(self, name: str) -> None:
        """The run has entered a phase."""
        self._phase = name
        self._phase_begin = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, Metric | float | None]) -> None:
        """A step has ended."""
        self.done = step
        self.say(step_line(step, self.total, metrics))

    def say(self, text: str) -> None:
        """Print a line above the live line (or plainly), at once."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def _render(self) -> Any:
        from rich.text import Text

        now = time.monotonic()
        width = 24
        filled = width * self.done // max(self.total, 1)
        text = (
            f"[{'#' * filled}{'.' * (width - filled)}] {self.done}/{self.total}  "
            f"{self._phase} {now - self._phase_begin:.0f}s"
        )
        finished = self.done - self._before
        if finished > 0:
            text += f"  left {_clock((now - self._begin) / finished * (self.total - self.done))}"
        return Text(text, no_wrap=True, overflow="ellipsis")


def _value(metric: Metric | float | None) -> float | None:
    return metric if metric is None or isinstance(metric, (int, float)) else metric.value


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
