"""Saying the first cause exactly once, whichever process is left to say it.

Whoever creates the report's file first is the one that prints; creating it is atomic on every file system that a job's
ranks share. Without a log folder the file lies in the temporary directory, so there it is once per host.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.controller.errors import JobError, block


class Reporter:
    """Prints the block on the process's own standard error, even after that was redirected into a log.

    Args:
        folder: the log folder, or None. Reports go to `<folder>/errors/<name>.txt`.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else Path(folder) / "errors"
        self._stderr = os.dup(2)

    def publish(self, name: str, error: JobError, notes: Sequence[str] = ()) -> bool:
        """Print and keep the error unless another process has done so for this `name`. Returns whether this one did."""
        path = (self.folder or Path(tempfile.gettempdir())) / f"{name}.txt"
        text = block(error, [*notes, f"This text: {path}"] if self.folder else notes)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as problem:  # a full disk must not hide the cause
            _write(self._stderr, block(error, [*notes, f"(not written to {path}: {problem})"]))
            return True
        _write(self._stderr, text)
        try:
            _write(handle, text)
            os.close(handle)
        except OSError:
            pass
        return True

    def close(self) -> None:
        os.close(self._stderr)


def redirect_output(folder: Path, rank: int) -> Sequence[int]:
    """Send this process's stdout and stderr to `<folder>/logs/rank_<rank>.log`. Returns the saved descriptors."""
    path = Path(folder) / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(1), os.dup(2)
    handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return saved


def restore_output(saved: Sequence[int]) -> None:
    """Undo `redirect_output`."""
    for target, handle in zip((1, 2), saved, strict=True):
        os.dup2(handle, target)
        os.close(handle)


def flush_output() -> None:
    """Flush Python's streams before os._exit. Bounded: another thread may hold a stream's lock, its pipe being full."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(1.0)


def _write(handle: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(handle, data) :]
