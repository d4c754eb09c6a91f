"""The loop's end of the control channel: a thread that owns the socket all ranks connect to.

It sends calls, collects answers, notices lost ranks and calls that take too long, and ends the job. The loop's thread
only waits on events; the hub keeps watching while the loop computes. On a failure it listens a moment longer, because
what is heard first is often a consequence (a peer's "connection closed"), settles on the first cause, gives the loop
some seconds to unwind, aborts every rank, publishes the cause and exits.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rlhf_megatron.controller import wire
from rlhf_megatron.controller.channel import CALLS, WATCH, Endpoint, configure
from rlhf_megatron.controller.errors import (
    CallTimeout,
    Interrupted,
    JobError,
    LoopError,
    RankLost,
    RemoteError,
    loop_error,
)
from rlhf_megatron.controller.report import Reporter, flush_output

SETTLE = 0.5  # seconds to listen on after the first sign of a failure
SETTLE_PLACES = 0.2  # where nothing can come that explains more: only the places of the others are waited for
SETTLE_SIGNAL = 1.5  # a launcher that noticed a dead rank sends SIGTERM to the others: wait for the disconnection
UNWIND = 5.0  # seconds that the loop gets to unwind
PROBE = 1.0  # seconds to look for the rank behind a disconnection
EXIT_CODE = 1
STOP = "end.stop"
NEVER = float("inf")


class Ticket:
    """One call on its way: the ranks that have not answered, and the answers of those whose result is wanted."""

    def __init__(self, stage: str, ranks: Iterable[int], wanted: Iterable[int], limit: float) -> None:
        self.stage, self.limit = stage, limit
        self.waiting, self.wanted = set(ranks), set(wanted)
        self.frames: dict[int, list[Any]] = {}
        self.error: JobError | None = None
        self.noticed = False
        # time.monotonic() when the first rank could turn to it, and when the last one had answered
        self.began, self.ended = NEVER, NEVER
        self._done = threading.Event()

    def done(self) -> bool:
        return self._done.is_set()

    def finish(self, error: JobError | None = None) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> dict[int, Any]:
        """Answers by job rank. Sleeps until they are there. Raises JobError when the job failed meanwhile."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return {rank: wire.unpack(frames) for rank, frames in self.frames.items()}


class Hub:
    """Bound at construction (so that the endpoint can be published before anything runs), serving from `start`.

    Args:
        places: text per job rank for messages, for example "pool main".
        host: address to listen on.
        reporter: says the first cause.
        heartbeat_timeout, call_timeout: seconds; a call's time starts when the rank has answered the calls before it.
        start_timeout: seconds until every rank must have connected and joined its pool.
    """

    def __init__(
        self, places: list[str], host: str, reporter: Reporter, *, heartbeat_timeout: float, call_timeout: float,
        start_timeout: float,
    ) -> None:
        self.places, self.reporter = places, reporter
        self.heartbeat_timeout, self.call_timeout = heartbeat_timeout, call_timeout
        self._context = zmq.Context()
        self._socket = configure(self._context.socket(zmq.ROUTER), heartbeat_timeout)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = Endpoint(f"tcp://{host}:{port}", secrets.token_hex(8))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._wake, self._woken = socket.socketpair()
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        ranks = range(len(places))
        self._names = {self.endpoint.identity(kind, rank): (kind, rank) for kind in (CALLS, WATCH) for rank in ranks}
        self._present: set[bytes] = set()
        self._calls: dict[int, deque[Ticket]] = {rank: deque() for rank in ranks}
        self._since = dict.fromkeys(ranks, time.monotonic())  # when the rank's first open call became its first
        self._suspect: JobError | None = None
        self._consequences: list[str] = []
        self._where: dict[int, str] = {}
        self._ended: tuple[BaseException, str] | None = None
        self._settle_at = self._unwind_until = self._notice_at = NEVER
        self._probe_until = 0.0
        self._stopping = self._closed = False
        self.failure: JobError | None = None
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self.joined = Ticket("start.join", ranks, (), start_timeout)
        for rank in ranks:
            self._calls[rank].append(self.joined)

    # ---- called by other threads -----------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def send(self, stage: str, messages: dict[int, Any], wanted: Iterable[int] = (), limit: float = 0.0) -> Ticket:
        """Send one message per rank. Returns at once; what is sent must not be written to before the ticket is done."""
        ticket = Ticket(stage, messages, wanted, limit or self.call_timeout)
        packed = {rank: wire.pack(message) for rank, message in messages.items()}
        self._command("send", ticket, packed)
        return ticket

    def end(self, error: BaseException, place: str) -> None:
        """The loop has failed at `place`: end every rank, this process last. Does not return."""
        self._command("end", error, place)
        threading.Event().wait()

    def stop(self, code: int) -> None:
        """Clean end: every rank leaves its serving loop, then the hub's thread ends."""
        self.send(STOP, {rank: {"kind": "stop", "code": code} for rank in self._calls}, limit=60.0).wait()
        self._command("close")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def waiting(self) -> dict[int, str]:
        """What is being waited for: by job rank, the call that is open there and since when."""
        now = time.monotonic()
        return {rank: f"{calls[0].stage} for {now - self._since[rank]:.1f} s"
                for rank, calls in self._calls.items() if calls}

    # ---- the hub's thread: input -----------------------------------------------------------------

    def _command(self, *command: Any) -> None:
        self._commands.put(command)
        self._wake.send(b"\0")

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            for item in (self._socket, self._monitor, self._woken.fileno()):
                poller.register(item, zmq.POLLIN)
            while not self._closed:
                events = dict(poller.poll(self._pause()))
                if self._monitor in events:
                    while self._monitor.poll(0):
                        recv_monitor_message(self._monitor)
                    self._probe_until = time.monotonic() + PROBE
                if self._socket in events:
                    self._read()
                if self._woken.fileno() in events:
                    self._woken.recv(4096)
                    while not self._commands.empty():
                        self._obey(*self._commands.get())
                self._check(time.monotonic())
        except BaseException as error:  # a fault of the hub itself must not leave a silent job behind
            self.failure = self.failure or loop_error(error)
            try:
                self._finish_job()
            finally:
                os._exit(EXIT_CODE)
        self._close()

    def _pause(self) -> int:
        """Milliseconds until something is due: at most a second, so that limits are kept to within that."""
        now = time.monotonic()
        tick = 0.02 if now < self._probe_until else 1.0
        due = min(self._settle_at, self._unwind_until, self._notice_at, now + tick)
        return max(0, int(1000 * (due - now)) + 1)

    def _obey(self, command: str, *arguments: Any) -> None:
        if command == "close":
            self._closed = True
        elif command == "end":
            error, place = arguments
            self._ended = error, place
            if self.failure is None and self._suspect is None:
                self._suspected(error if isinstance(error, JobError) else loop_error(error), SETTLE_PLACES)
        elif self.failure is not None:
            arguments[0].finish(self.failure)
        else:
            ticket, packed = arguments
            self._stopping = ticket.stage == STOP
            for rank, frames in packed.items():
                if not self._calls[rank]:
                    self._since[rank] = time.monotonic()
                self._calls[rank].append(ticket)
                self._send(CALLS, rank, *frames)

    def _send(self, kind: bytes, rank: int, *frames: Any) -> None:
        identity = self.endpoint.identity(kind, rank)
        if identity not in self._present:
            return
        try:
            self._socket.send_multipart([identity, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lost(rank)

    def _read(self) -> None:
        while True:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            name = self._names.get(sender.bytes)
            if name is None or not frames:
                continue  # a stranger
            kind, rank = name
            if sender.bytes not in self._present:
                self._present.add(sender.bytes)  # its hello
            elif kind == CALLS:
                self._answered(rank, frames[0].bytes, frames[1:])
            elif frames[0].bytes == b"where":
                self._where[rank] = frames[1].bytes.decode(errors="replace")
            elif frames[0].bytes == b"signal":
                self._interrupted(rank, int(frames[1].bytes))

    def _answered(self, rank: int, kind: bytes, frames: list[Any]) -> None:
        if kind == b"error":
            return self._suspected(RemoteError(rank, place=self.places[rank], **wire.unpack(frames)), SETTLE)
        ticket = self._calls[rank].popleft()
        ticket.began = min(ticket.began, self._since[rank])
        self._since[rank] = ticket.ended = time.monotonic()
        ticket.waiting.discard(rank)
        if rank in ticket.wanted:
            ticket.frames[rank] = frames
        if ticket.stage == STOP:
            self._forget(rank)
        if not ticket.waiting and not ticket.done():
            ticket.finish()
        return None

    # ---- the hub's thread: failures --------------------------------------------------------------

    def _check(self, now: float) -> None:
        if self._probe_until:
            last = now >= self._probe_until
            if last:
                self._probe_until = 0.0
            if last or not self._stopping:  # while stopping, a rank's answer may still be on its way
                for kind, rank in self._names.values():
                    self._send(kind, rank, b"ping")
        if self.failure is not None:
            if self._ended is not None or now >= self._unwind_until:
                self._finish_job()
        elif self._suspect is not None:
            if now >= self._settle_at:
                self._settle(now)
        else:
            self._check_limits(now)

    def _check_limits(self, now: float) -> None:
        late: dict[int, Ticket] = {}
        for rank, calls in self._calls.items():
            if not calls:
                continue
            ticket, taken = calls[0], now - self._since[rank]
            if taken > ticket.limit:
                late[rank] = ticket
            elif taken > ticket.limit / 2 and not ticket.noticed:
                ticket.noticed = True
                self._ask_where()
                self._notice_at = now + SETTLE
        if late:
            ticket = next(iter(late.values()))
            limit = "cluster.collective_timeout" if ticket is self.joined else "cluster.call_timeout"
            ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(str(rank) for rank in late)}"
            cause = f"{ticket.stage} took longer than {limit}={ticket.limit:g} s on {ranks}"
            self._suspected(CallTimeout(tuple(late), cause), SETTLE)
        if now >= self._notice_at:
            self._notice_at = NEVER
            lines = [f"rank {rank}: {call}: {self._where.get(rank, 'no answer')}"
                     for rank, call in self.waiting().items()]
            print("rlhf_megatron: still waiting for\n  " + "\n  ".join(lines), file=sys.stderr, flush=True)

    def _suspected(self, error: JobError, settle: float) -> None:
        """Something failed. Keep the error that explains the others; listen on for `settle` seconds."""
        if self.failure is not None:
            return
        if self._suspect is None:
            self._settle_at = time.monotonic() + settle
            self._ask_where()
        other: JobError | None = error
        if self._suspect is None or (error.blame < self._suspect.blame and not isinstance(self._suspect, LoopError)):
            other, self._suspect = self._suspect, error
        if other is not None and not isinstance(other, Interrupted):
            self._consequences.append(other.cause.splitlines()[0][:200])

    def _lost(self, rank: int) -> None:
        calls = self._calls[rank]
        self._forget(rank)
        doing = f" in {calls[0].stage}" if calls else " between calls"
        cause = (f"rank {rank} ({self.places[rank]}) was lost{doing}: its process is gone (killed or exited) or was "
                 f"silent for {self.heartbeat_timeout:g} s")
        self._suspected(RankLost(rank, cause), SETTLE_PLACES)

    def _forget(self, rank: int) -> None:
        for kind in (CALLS, WATCH):
            self._present.discard(self.endpoint.identity(kind, rank))

    def _interrupted(self, rank: int, number: int) -> None:
        name = signal.Signals(number).name
        cause = f"rank {rank} ({self.places[rank]}) received {name}: the launcher or a user ended the job"
        absent = [r for r in self._calls if self.endpoint.identity(CALLS, r) not in self._present]
        if absent and not self.joined.done():
            cause += f"; ranks that had not connected: {absent}"
        self._suspected(Interrupted(cause), SETTLE_SIGNAL)

    def _ask_where(self) -> None:
        self._where = {}
        for rank in self._calls:
            self._send(WATCH, rank, b"where")

    def _settle(self, now: float) -> None:
        error = self._suspect
        assert error is not None, "settled without a suspect"
        for rank in self._calls:
            if rank == getattr(error, "rank", None):
                continue
            known = self.endpoint.identity(WATCH, rank) in self._present
            error.elsewhere[rank] = self._where.get(rank) or (
                "no answer: it is stopped, or holds the interpreter lock" if known else "not connected")
        self.failure, self._unwind_until = error, now + UNWIND
        for calls in self._calls.values():
            for ticket in calls:
                if not ticket.done():
                    ticket.finish(error)

    def _finish_job(self) -> None:
        """End every other rank, say the first cause, end this process."""
        assert self.failure is not None, "ended without a failure"
        notes = [f"Then: {line}" for line in self._consequences[:3]]
        if self._ended is not None:
            error, place = self._ended
            if isinstance(error, JobError):
                notes.append(f"The loop was at {place}")
            elif self.failure.blame < 4:  # else it is the failure itself
                notes.append(f"The loop then raised {type(error).__name__} at {place}")
        for rank in self._calls:
            if rank != 0:
                self._send(WATCH, rank, b"abort")
        self._close(linger=2000)
        flush_output()
        self.reporter.publish(self.endpoint.report_name, self.failure, notes)
        os._exit(EXIT_CODE)

    def _close(self, linger: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)
        self._context.term()
