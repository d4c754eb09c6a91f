"""Run a function on n forked gloo ranks, with a hard timeout, from a test.

    run_ranks(4, body, argument)      # body(rank, argument) on each of four ranks; returns [body's return value, ...]

The parent has imported everything already, so forking costs milliseconds where starting interpreters costs seconds.
Each child leads its own process group and is killed with everything it started when the call ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE = 3.0  # seconds that the other ranks get after the first failure, so that their own errors are heard too


class RanksFailed(AssertionError):
    """One or more ranks raised, died or did not end in time; the message holds each rank's traceback."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """fn(rank, *args) on n gloo ranks of one world -> the ranks' return values (must pickle) in rank order.

    RanksFailed when a rank raises, dies, or `timeout` seconds are over; every child is gone when this returns.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}  # pid -> rank
    started: list[int] = []
    try:
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                _child(rank, n, fn, args, folder, timeout)  # never returns
            children[pid] = rank
            started.append(pid)
            _lead_group(pid)  # here as well as in the child: whichever comes first, the group exists before we kill it
        failures = _wait(children, timeout)
        for rank in range(n):
            report = folder / f"{rank}.error"
            if report.exists():
                failures[rank] = report.read_text()
        if failures:
            raise RanksFailed("".join(f"\n--- rank {rank} of {n}: {text}" for rank, text in sorted(failures.items())))
        # written by our own children a moment ago, in a directory of ours: safe to unpickle
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(n)]
    finally:
        for pid in started:
            _kill_group(pid)
        for pid in list(children):
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _child(rank: int, n: int, fn: Callable[..., Any], args: tuple, folder: Path, timeout: float) -> None:
    code = 1
    try:
        _lead_group(0)
        _die_with_parent()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), n), rank=rank, world_size=n,
                                timeout=timedelta(seconds=timeout))
        result = fn(rank, *args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()  # nobody leaves while another still talks to it
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no atexit handlers, no pytest teardown in a child


def _wait(children: dict[int, int], timeout: float) -> dict[int, str]:
    """Reap children (removing them from the dict) until all ended, time is up, or GRACE passed since a failure."""
    failures: dict[int, str] = {}
    deadline, limit = time.monotonic() + timeout, f"did not end within {timeout:g} s and was killed"
    while children:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank, code = children.pop(pid), os.waitstatus_to_exitcode(status)
                if code:
                    failures[rank] = f"ended with code {code}"
                    if time.monotonic() + GRACE < deadline:
                        deadline, limit = time.monotonic() + GRACE, "was still running after another rank failed"
        if children and time.monotonic() > deadline:
            failures.update({rank: limit for rank in children.values()})
            return failures
        time.sleep(0.005)
    return failures


def _lead_group(pid: int) -> None:
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # the child did it itself, or has ended


def _die_with_parent() -> None:
    """Linux: a test run that is killed takes its ranks along (PR_SET_PDEATHSIG = 1)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the whole group has ended
