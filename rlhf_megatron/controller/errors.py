"""What ends a job, and the block of text that says so once.

Every error here carries `cause` (one paragraph: who, in what, what happened), `details` (for example the remote
traceback) and `elsewhere` (where the other ranks were). The order of the classes is the order of blame: a rank that is
gone explains the errors of the ranks that were talking to it, not the other way round.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

WIDTH = 88
TITLE = " rlhf_megatron: the job ended with an error "
_SHOWN = 8  # ranks listed under "Elsewhere"


class JobError(RuntimeError):
    """The job cannot go on. Every rank is about to be ended."""

    blame = 9  # of several causes heard at the same time the one with the lowest number is the first cause

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(cause)
        self.cause, self.details = cause, details.rstrip()
        self.elsewhere: dict[int, str] = {}

    def __str__(self) -> str:
        return f"{self.cause}\n{self.details}" if self.details else self.cause


class RankLost(JobError):
    """The process of `rank` is gone, or has been silent for longer than the heartbeat's timeout."""

    blame = 0

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank


class RemoteError(JobError):
    """A worker method raised. `rank` is the job rank; `kind` and `message` are those of the remote exception."""

    blame = 1

    def __init__(
        self, rank: int, role: str, method: str, kind: str, message: str, remote_traceback: str, place: str = ""
    ) -> None:
        where = f"rank {rank}" + (f" ({place})" if place else "")
        super().__init__(f"{where} failed in {role}.{method}: {kind}: {message}", remote_traceback)
        self.rank, self.role, self.method = rank, role, method
        self.kind, self.message, self.remote_traceback = kind, message, remote_traceback


class CallTimeout(JobError):
    """A call took longer than cluster.call_timeout on `ranks`."""

    blame = 2

    def __init__(self, ranks: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.ranks = tuple(ranks)


class Interrupted(JobError):
    """Someone asked the job to end (SIGTERM, SIGINT)."""

    blame = 3


class LoopError(JobError):
    """The loop's own code raised."""

    blame = 4


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """(type name, message, traceback without the last lines that repeat type and message)."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    lines = list(traceback.TracebackException.from_exception(error).format())
    repeated = len(list(traceback.TracebackException.from_exception(error).format_exception_only()))
    return name, str(error), "".join(lines[: len(lines) - repeated]).rstrip()


def loop_error(error: BaseException) -> LoopError:
    """The error of an exception that came out of the loop's own code.

    An exception whose class says `explains_itself = True` names what the user has to change: no traceback is shown.
    """
    name, message, text = describe_exception(error)
    if getattr(error, "explains_itself", False):
        return LoopError(message)
    return LoopError(f"the loop failed: {name}: {message}", text)


def block(error: JobError, notes: Sequence[str] = ()) -> str:
    """The marked block. The cause comes near its end, so that the tail of a log shows it."""
    lines = [TITLE.center(WIDTH, "=")]
    if error.details:
        lines.append(error.details)
    if error.elsewhere:
        lines.append("Elsewhere at that moment:")
        shown = sorted(error.elsewhere.items())
        lines += [f"  rank {rank}: {text}" for rank, text in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            lines.append(f"  and {len(shown) - _SHOWN} more ranks")
    lines.append(f"First cause: {error.cause}")
    lines += notes
    return "\n".join([*lines, "=" * WIDTH]) + "\n"


def frame_of(error: BaseException, outside: str) -> str:
    """The first line of the traceback that is not in the file `outside`: where the loop's own code was."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.filename != outside:
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "its start"
