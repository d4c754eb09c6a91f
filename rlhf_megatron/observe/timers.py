"""Wall-clock timers for the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhf_megatron.observe.metrics import Sum


class Timers:
    """Seconds per phase of the current step; a phase entered several times (mini-batches) adds up.

    Use: `with timers("generate"): ...`, then `timers.metrics()`, and `timers.reset()` before the next step. A phase
    that raises is counted, too. `on_start`, if given, is called with the name of each phase that begins, which is how
    a progress line knows what the run is doing now. Times are wall time of the calling thread: what runs behind a
    future is counted where it is waited for.
    """

    def __init__(
        self, on_start: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.on_start = on_start
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of a block as time of `phase`."""
        if self.on_start is not None:
            self.on_start(phase)
        begin = self.clock()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.clock() - begin

    def metrics(self) -> dict[str, Sum]:
        """`timing/<phase>` in seconds, in the order in which the phases first ended."""
        return {f"timing/{phase}": Sum(seconds) for phase, seconds in self.seconds.items()}

    def reset(self) -> None:
        """A fresh start for the next step."""
        self.seconds = {}
