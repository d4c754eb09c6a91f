"""A rank's end of the control channel: one socket for calls, and a watchdog thread with a socket of its own.

The watchdog hears what the main thread cannot hear while it computes or waits in a collective: that the loop is gone,
that the job is aborted, that somebody wants to know where this rank is, that a signal has arrived.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from rlhf_megatron.controller import wire

CALLS, WATCH = b"m", b"w"
SIGNAL_GRACE = 10.0  # seconds from a signal to this rank's own end, if the loop does not end the job before
_WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Endpoint(NamedTuple):
    """Where the loop listens. `token` is part of every identity, so that no stranger can speak for a rank."""

    address: str
    token: str

    def identity(self, kind: bytes, rank: int) -> bytes:
        return b"%s%d-%s" % (kind, rank, self.token.encode())

    @property
    def report_name(self) -> str:
        """Name of the file that holds the first cause: one per job and life."""
        return f"rlhf_megatron-error-{self.token}"

    def encode(self) -> bytes:
        return f"{self.address} {self.token}".encode()

    @classmethod
    def decode(cls, text: bytes) -> Endpoint:
        return cls(*text.decode().split(" "))


def configure(sock: zmq.Socket, heartbeat_timeout: float) -> zmq.Socket:
    """Options of every socket: nothing is dropped, nothing lingers, a silent peer is noticed, nobody reconnects."""
    timeout = max(200, int(heartbeat_timeout * 1000))
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, timeout)
    sock.setsockopt(zmq.HEARTBEAT_IVL, min(2000, timeout // 4))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
    sock.setsockopt(zmq.HEARTBEAT_TTL, min(timeout, 6_500_000))
    return sock


def stack_of(thread: int, depth: int = 4) -> str:
    """Innermost frames of a thread, for example "rows.py:12 load <- actor.py:80 update"."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "no such thread"
    frames = traceback.extract_stack(frame)[-depth:]
    return " <- ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames))


class RankEnd:
    """Created in the process's main thread, which then calls `receive` and `reply` in turn.

    Args:
        rank: job rank.
        lost: called in the watchdog thread when the loop is gone; does not return.
        aborted: called in the watchdog thread when the loop ends the job; does not return.
    """

    def __init__(
        self, rank: int, endpoint: Endpoint, heartbeat_timeout: float, lost: Callable[[str], None],
        aborted: Callable[[], None],
    ) -> None:
        self.rank, self.endpoint, self.heartbeat_timeout = rank, endpoint, heartbeat_timeout
        self.doing, self.since = "starting", time.monotonic()
        self._lost, self._aborted = lost, aborted
        self._main = threading.get_ident()
        self._context = zmq.Context()
        self._calls = self._connect(CALLS)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._stopping = False
        self._signals = _Signals(self._wake.fileno())
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watchdog.start()

    def receive(self) -> Any:
        """The next message of the loop. Blocks."""
        while True:
            frames = self._calls.recv_multipart(copy=False)
            if frames[0].bytes != b"ping":
                return wire.unpack(frames)

    def reply(self, value: Any, kind: bytes = b"ok") -> None:
        """Send an answer; returns when its buffers are free again, so that the next call may overwrite tensors."""
        tracker = self._calls.send_multipart([kind, *wire.pack(value)], copy=False, track=True)
        if tracker is not None:
            tracker.wait()

    def begin(self, doing: str) -> None:
        """Say what the main thread does from now on."""
        self.doing, self.since = doing, time.monotonic()

    def where(self) -> str:
        return f"{self.doing} for {time.monotonic() - self.since:.1f} s, at {stack_of(self._main)}"

    def retire(self) -> None:
        """The loop is about to close its end, and that is no failure any more: end the watchdog."""
        self._stopping = True
        self._wake.send(b"\0")
        self._watchdog.join()
        self._signals.restore()

    def close(self) -> None:
        """After `retire`: what was sent is delivered, the sockets are closed."""
        self._calls.close(linger=5000)
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _connect(self, kind: bytes) -> zmq.Socket:
        sock = configure(self._context.socket(zmq.DEALER), self.heartbeat_timeout)
        sock.setsockopt(zmq.IDENTITY, self.endpoint.identity(kind, self.rank))
        if kind == WATCH:
            # CLOSED is the event of a connection that never came about
            self._monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        sock.connect(self.endpoint.address)
        sock.send(b"hello")
        return sock

    def _watch(self) -> None:
        sock = self._connect(WATCH)
        poller = zmq.Poller()
        for item in (sock, self._monitor, self._woken.fileno()):
            poller.register(item, zmq.POLLIN)
        signalled = None
        while not self._stopping:
            events = dict(poller.poll(200 if signalled else None))
            if sock in events or self._monitor in events:
                self._hear(sock)  # before looking at the disconnection: an abort may be waiting in the socket
            if self._monitor in events and not self._stopping:
                self._lost(f"its connection to rank {self.rank} closed (killed or exited), or it was silent for "
                           f"{self.heartbeat_timeout:g} s; rank {self.rank} was {self.where()}")
            if self._woken.fileno() in events:
                for number in self._woken.recv(64):
                    if number in _WATCHED_SIGNALS and signalled is None:
                        signalled = number, time.monotonic()
                        _tell(sock, b"signal", b"%d" % number)
            if signalled and time.monotonic() - signalled[1] > SIGNAL_GRACE:
                os._exit(128 + signalled[0])
        sock.disable_monitor()
        self._monitor.close()
        sock.close()

    def _hear(self, sock: zmq.Socket) -> None:
        while True:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames[0] == b"abort":
                self._aborted()
            elif frames[0] == b"where":
                _tell(sock, b"where", self.where().encode())


def _tell(sock: zmq.Socket, *frames: bytes) -> None:
    try:
        sock.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        pass  # the loop has closed its end: a blocking send would wait for ever, and never hear the abort


class _Signals:
    """SIGTERM and SIGINT wake the watchdog, also while the main thread is blocked in C++ and runs no Python handler."""

    active: _Signals | None = None

    def __init__(self, wake: int) -> None:
        self._old = {number: signal.signal(number, lambda *_: None) for number in _WATCHED_SIGNALS}
        self._old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        _Signals.active = self

    def restore(self) -> None:
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _Signals.active = None


def _forget_in_child() -> None:
    # A forked child (a reward runner, say) must die of SIGTERM as usual, and must not wake the parent's watchdog.
    if _Signals.active is not None:
        signal.set_wakeup_fd(-1)
        for number in _WATCHED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _Signals.active = None


os.register_at_fork(after_in_child=_forget_in_child)
