"""What the benchmarks of whole roles share: a config of a run, the project's own ranks and workers, timed phases.

A benchmark names its worker classes and a loop; the job is started as `rlhf_megatron.train` starts one: by torchrun, by
launch/slurm.sbatch, or as one process. Nothing here opens a socket or makes a process group.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNUSED = ("data.", "reward.", "trainer.resume", "trainer.rollouts.")  # keys that no benchmark reads: they may be wrong


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("words", nargs="*", metavar="[CONFIG] key=value",
                      help="a run's YAML and overrides; without CONFIG: a tiny random model, in this process")
    made.add_argument("--single", action="store_true", help="one process, as in `rlhf-megatron train --single`")
    made.add_argument("--rows", type=int, default=0, help="responses; default: those of one optimizer update")
    made.add_argument("--prompt", type=span, help="tokens of a prompt, N or LOW:HIGH; default: data.max_prompt_tokens")
    made.add_argument("--warmup", type=int, default=1, help="repeats that are not counted")
    made.add_argument("--repeats", type=int, default=3, help="repeats that are; the median of their seconds is told")
    made.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results",
                      help="folder of the records (benchmarks/results)")
    return made


def span(text: str) -> tuple[int, int]:
    """An argparse type: "N" or "LOW:HIGH", numbers of at least 1."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor LOW:HIGH with numbers of at least 1")
    return int(low), int(high or low)


@dataclass(frozen=True)
class Phase:
    """One timed call: the name of a phase, the role that does it, what it does, and a check of its result.

    The role's workers have the method `settle` of workers.Settles.
    """

    name: str
    group: Any
    call: Callable[[], Any]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Timing:
    """Median seconds of a phase (of the slowest rank), its peak memory per rank in MiB, and the ranks of its pool."""

    seconds: float
    memory_mb: float
    ranks: int


def measure(phases: Sequence[Phase], warmup: int, repeats: int) -> dict[str, Timing]:
    """All phases in turn, `warmup` + `repeats` times; every result is checked, those of the warm-up, too."""
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup={warmup}, repeats={repeats}: at least 0 and at least 1")
    seconds: dict[str, list[float]] = {phase.name: [] for phase in phases}
    peaks = dict.fromkeys(seconds, 0.0)
    for turn in range(warmup + repeats):
        for phase in phases:
            phase.group.settle(start=True)
            started = time.perf_counter()
            result = phase.call()
            peak = phase.group.settle(start=False)
            took = time.perf_counter() - started
            phase.check(result)
            if turn >= warmup:
                seconds[phase.name].append(took)
                peaks[phase.name] = max(peaks[phase.name], peak)
    return {phase.name: Timing(statistics.median(seconds[phase.name]), peaks[phase.name], phase.group.pool.size)
            for phase in phases}


def run(
    options: argparse.Namespace, demo: Sequence[str], workers: Callable[[Any], Mapping[str, type]],
    loop: Callable[[Any, dict[str, Any]], dict[str, Any]],
) -> dict[str, Any] | None:
    """Take this process's part in the benchmark.

    Args:
        options: of `parser`.
        demo: overrides of the demo's YAML where no CONFIG is given.
        workers: config -> worker class by role. Called when the device has been chosen, which importing them needs.
        loop: (config, groups) -> figures; runs beside rank 0.

    Returns:
        The loop's figures on rank 0, None on the others.

    Raises:
        SystemExit: 2 after the config was refused, with all violations in one message of rank 0.
    """
    launched = not options.single and "RANK" in os.environ
    rank = int(os.environ["RANK"]) if launched else 0
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if launched else 1
    from rlhf_megatron import devices
    from rlhf_megatron.config.errors import ConfigError

    with _words(options, demo, launched) as (path, overrides):
        try:
            config = _checked(path, overrides, ranks, launched)
        except ConfigError as error:
            if rank == 0:
                print(f"refused\n{error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        devices.choose(config.run.device, config.run.deterministic)
        from rlhf_megatron.controller.transports import transport

        found: list[dict[str, Any]] = []
        code = transport(config.cluster.transport).run(
            config, workers(config), lambda groups: found.append(loop(config, groups))  # type: ignore[func-returns-value]
        )
    if code:
        raise SystemExit(code)
    return found[0] if found else None


@contextlib.contextmanager
def _words(options: argparse.Namespace, demo: Sequence[str], launched: bool) -> Iterator[tuple[str, list[str]]]:
    """Path of the config and overrides; the tiny model, where it is needed, lives as long as the block."""
    words = list(options.words)
    if words and "=" not in words[0]:
        yield words[0], words[1:]
        return
    if launched:  # each rank would make a model of its own
        raise SystemExit("name a CONFIG: without one the benchmark is one process and takes no launcher")
    from transformers.utils.logging import disable_progress_bar

    from examples.make_demo_model import make

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "demo")
        yaml = str(ROOT / "yaml_configs" / "demo_ppo_cpu.yaml")
        yield yaml, [f"actor.model={folder}/demo/model", "run.device=cpu", *demo, *words]


def _checked(path: str, overrides: Sequence[str], ranks: int, launched: bool) -> Any:
    from rlhf_megatron import devices
    from rlhf_megatron.config import checks, load
    from rlhf_megatron.config.errors import ConfigError

    config = load.load_config(path, overrides)
    if not launched:
        config, changes = checks.single(config)
        for change in changes:
            print(f"one process: {change}", file=sys.stderr, flush=True)
    violations = [violation for violation in checks.check(config, ranks=ranks, gpus=devices.gpu_count())
                  if not violation.key.startswith(UNUSED)]
    if violations:
        raise ConfigError.of(violations)
    return config
