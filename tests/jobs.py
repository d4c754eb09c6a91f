"""Whole jobs in tests: the ranks are forked from this process (imports once), set up as a launcher sets them up.

    result = run_job(["config.yaml", "trainer.steps=2"], ranks=4)
    result.codes == [0, 0, 0, 0]; result.output has what all ranks printed
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

YAML = Path(__file__).resolve().parents[1] / "yaml_configs" / "demo_ppo_cpu.yaml"


@dataclass
class JobResult:
    codes: list[int]     # exit code per rank; negative: ended by that signal; None never happens (the timeout kills)
    output: str          # stdout and stderr of all ranks
    seconds: float
    timed_out: bool
    left_behind: int     # processes of the ranks' groups that were still there when the last rank had ended


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_job(
    ranks: int, main: Callable[[], int], timeout: float = 120.0,
    meanwhile: Callable[[list[int]], None] = lambda pids: None,
) -> JobResult:
    """Run `main()` in `ranks` forked processes with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set.

    `meanwhile(pids)` is called here while they run, once, with their process ids by rank; it must return by itself.
    """
    port, started = free_port(), time.monotonic()
    with tempfile.TemporaryFile() as out:
        pids: dict[int, int] = {}
        for rank in range(ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _child(rank, ranks, port, out.fileno(), main)
            pids[pid] = rank
        codes: list[int | None] = [None] * ranks
        everyone, timed_out = list(pids), False
        meanwhile(everyone)
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in pids:
                codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - started > timeout:
                timed_out = True
                for left in pids:
                    _kill_group(left)
            else:
                time.sleep(0.02)
        left_behind = sum(_kill_group(pid) for pid in everyone)
        out.seek(0)
        text = out.read().decode(errors="replace")
    return JobResult([code if code is not None else -1 for code in codes], text, time.monotonic() - started, timed_out,
                     left_behind)


def run_job(arguments: list[str], ranks: int, timeout: float = 120.0) -> JobResult:
    """`python -m rlhf_megatron.train ARGUMENTS` on `ranks` forked processes."""
    from rlhf_megatron import train

    return fork_job(ranks, lambda: train.main([str(a) for a in arguments]), timeout)


def run_loop(
    arguments: list[str], ranks: int, loop: Callable[[Any, dict[str, Any]], int], timeout: float = 120.0,
    workers: dict[str, Any] | None = None, meanwhile: Callable[[list[int]], None] = lambda pids: None,
) -> JobResult:
    """Like run_job, with another loop(config, groups) instead of the trainer's, and other worker classes by role."""
    from rlhf_megatron import devices, train
    from rlhf_megatron.controller.transports import transport

    def main() -> int:
        config = train.read_config(train.parse_arguments([str(a) for a in arguments]), ranks)
        devices.choose(config.run.device, config.run.deterministic)
        roles = train.roles_of(config) | (workers or {})
        folder = Path(config.run.folder) / config.run.name
        return transport(config.cluster.transport).run(
            config, roles, lambda groups: loop(config, groups), log_folder=folder
        )

    return fork_job(ranks, main, timeout, meanwhile)


def arguments(demo: Path, runs: Path, name: str, *overrides: str) -> list[str]:
    """A short run of the demo's YAML: 8 prompts x 4 responses, fp32."""
    given = [
        f"run.name={name}", f"run.folder={runs}", f"data.train={demo}/class_train.jsonl", f"actor.model={demo}/model",
        "trainer.prompts_per_step=8", "generation.samples_per_prompt=4", "trainer.mini_batch_size=16",
        "trainer.steps=3", "trainer.stop_reward=null", "trainer.save_hf=never",
        "actor.micro_batch_size=2", "critic.micro_batch_size=4", "reference.micro_batch_size=8",
        "actor.optimizer.lr=1e-4", "critic.optimizer.lr=1e-4",
    ]
    for override in overrides:
        if override.startswith("{all}"):
            given += [override.replace("{all}", f"{role}.parallel") for role in ("actor", "critic", "reference")]
        else:
            given.append(override)
    flags = [item for item in given if item.startswith("--")]
    return [str(YAML), *flags, *[item for item in given if not item.startswith("--")]]


def metrics(runs: Path, name: str) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def succeeded(result) -> None:
    assert result.codes == [0] * len(result.codes), result.output[-4000:]


def _child(rank: int, ranks: int, port: int, out: int, main: Callable[[], int]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal; a job in the background ignores it
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for name in [n for n in os.environ if n.startswith(("TORCHELASTIC_", "SLURM_"))]:
            del os.environ[name]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill_group(pid: int) -> bool:
    """Whether there was anything left to kill."""
    try:
        os.killpg(pid, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):
        return False
