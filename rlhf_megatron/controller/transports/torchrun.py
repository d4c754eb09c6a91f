"""Many processes started by torchrun, srun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Every process joins its pool's world and serves calls in its main thread. Rank 0 also runs the loop, in a thread of its
own that never enters a collective, and the hub that the loop's calls go through.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from rlhf_megatron.controller.channel import Endpoint, RankEnd
from rlhf_megatron.controller.errors import RankLost, describe_exception, frame_of
from rlhf_megatron.controller.hub import EXIT_CODE, Hub, Ticket
from rlhf_megatron.controller.pools import (
    JobEnvironment,
    LaunchError,
    ResourcePool,
    die_with_parent,
    join_world,
    parse_pools,
    pool_of,
)
from rlhf_megatron.controller.report import Reporter, flush_output, redirect_output, restore_output
from rlhf_megatron.controller.serve import Workers
from rlhf_megatron.controller.worker_group import WorkerGroup
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.workers.base import RankContext, Worker

Loop = Callable[[dict[str, WorkerGroup]], int | None]
_ENDPOINT = "loop/endpoint"


class _Results:
    """A ticket whose answers are keyed by pool rank."""

    def __init__(self, ticket: Ticket, pool: ResourcePool) -> None:
        self._ticket, self._pool = ticket, pool

    def done(self) -> bool:
        return self._ticket.done()

    @property
    def span(self) -> tuple[float, float]:
        return self._ticket.began, self._ticket.ended

    def wait(self) -> dict[int, Any]:
        return {self._pool.ranks.index(rank): value for rank, value in self._ticket.wait().items()}


class TorchrunTransport:
    """Sends calls through the hub: rows to the entry ranks only, each row once."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def call(
        self, pool: ResourcePool, role: str, method: str, kwargs: dict[str, Any], rows: Mapping[int, DataProto],
        wanted: tuple[int, ...],
    ) -> _Results:
        messages = {
            job_rank: {"kind": "call", "role": role, "method": method, "kwargs": kwargs, "rows": rows.get(rank),
                       "reply": rank in wanted}
            for rank, job_rank in enumerate(pool.ranks)
        }
        ticket = self._hub.send(f"{role}.{method}", messages, [pool.ranks[rank] for rank in wanted])
        return _Results(ticket, pool)


def run(
    config: Any, roles: Mapping[str, type[Worker]], loop: Loop, log_folder: str | Path | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Take this process's part in the job. Call it in the main thread, with the same arguments on every rank.

    Args:
        config: equal on every rank; `cluster` and each role's `pool` are read here.
        roles: worker class by role, built in this order.
        loop: runs on rank 0 with a WorkerGroup per role; returns the exit code (None counts as 0).
        log_folder: ranks other than 0 write their output to `<log_folder>/logs/rank_<r>.log`, and the first cause of a
            failure is kept in `<log_folder>/errors/`.
        prepare: runs on rank 0 before the loop, while the roles are built: what may be refused without them.

    Returns:
        The loop's exit code, on every rank. After a failure the process does not return: the first cause is printed
        once per job and every rank exits.

    Raises:
        LaunchError: the process cannot join the job.
    """
    die_with_parent()
    job = JobEnvironment.read()
    try:
        pools = parse_pools(config.cluster.pools, job.size)
        for role in roles:
            pool_of(role, config, pools)
    except LaunchError:
        if job.rank == 0:  # every rank finds the same: one message is enough
            raise
        raise SystemExit(EXIT_CODE) from None
    return _Process(config, roles, loop, prepare, job, pools, None if log_folder is None else Path(log_folder)).run()


class _Process:
    """One rank's part of the job."""

    def __init__(
        self, config: Any, roles: Mapping[str, type[Worker]], loop: Loop, prepare: Callable[[], None],
        job: JobEnvironment, pools: dict[str, ResourcePool], log_folder: Path | None,
    ) -> None:
        self.config, self.roles, self.loop, self.prepare = config, roles, loop, prepare
        self.job, self.pools = job, pools
        self.pool = next(pool for pool in pools.values() if job.rank in pool.ranks)
        self.log_folder = log_folder
        self.redirected = log_folder is not None and job.rank != 0
        self.reporter = Reporter(log_folder)
        context = RankContext(
            rank=self.pool.ranks.index(job.rank), size=self.pool.size, pool=self.pool.name, job_rank=job.rank,
            seed=getattr(getattr(config, "trainer", None), "seed", 0),
        )
        self.workers = Workers(config, roles, context)
        self.stage = ("start", "join")

    def run(self) -> int:
        saved = None
        if self.redirected and self.log_folder is not None:
            saved = redirect_output(self.log_folder, self.job.rank)
        cluster, job = self.config.cluster, self.job
        environment = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
        try:
            store = job.store(cluster.collective_timeout)
            hub = self._open_hub(store) if job.rank == 0 else None
            self.endpoint = Endpoint.decode(self._published(store))
            end = RankEnd(job.rank, self.endpoint, cluster.heartbeat_timeout, self._loop_is_lost, self._aborted)
            end.begin("start.join")
            self._guarded(end, lambda: join_world(self.pool, job, store, cluster.collective_timeout))
            loop_thread = self._start_loop(hub) if hub else None
            code = self._serve(end)
            end.close()
            if loop_thread is not None:
                loop_thread.join()  # rank 0 leaves last: it may host the store
        finally:
            os.environ.update(environment)
            self.reporter.close()
            if saved is not None:
                sys.stdout.flush()
                sys.stderr.flush()
                restore_output(saved)
        return code

    # ---- start -----------------------------------------------------------------------------------

    def _open_hub(self, store: dist.Store) -> Hub:
        cluster = self.config.cluster
        places = [f"pool {pool.name}" for pool in self.pools.values() for _ in pool.ranks]
        hub = Hub(places, self.job.listen_address(), self.reporter, heartbeat_timeout=cluster.heartbeat_timeout,
                  call_timeout=cluster.call_timeout, start_timeout=cluster.collective_timeout)
        # before any thread starts: a store's client is for one thread
        store.set(_ENDPOINT, hub.endpoint.encode())  # type: ignore[arg-type]  # bytes are taken, too
        hub.start()
        return hub

    def _published(self, store: dist.Store) -> bytes:
        try:
            return store.get(_ENDPOINT)
        except RuntimeError as error:
            limit = self.config.cluster.collective_timeout
            raise LaunchError(f"rank {self.job.rank} waited {limit:g} s for rank 0 to say where the loop listens "
                              f"({str(error).splitlines()[0]}); look at rank 0's output") from None

    def _start_loop(self, hub: Hub) -> threading.Thread:
        # The main thread of rank 0 computes: let the loop's and the hub's threads have their turns promptly.
        sys.setswitchinterval(0.0005)
        thread = threading.Thread(target=self._run_loop, args=(hub,), name="loop", daemon=True)
        thread.start()
        return thread

    # ---- the loop's thread (rank 0) --------------------------------------------------------------

    def _run_loop(self, hub: Hub) -> None:
        try:
            hub.joined.wait()
            transport = TorchrunTransport(hub)
            groups, builds = {}, []
            for role, worker_cls in self.roles.items():
                pool = pool_of(role, self.config, self.pools)
                groups[role] = WorkerGroup(role, worker_cls, self.config, pool, transport)
                builds.append(hub.send(f"{role}.build", {rank: {"kind": "build", "role": role} for rank in pool.ranks}))
            self.prepare()
            for build in builds:
                build.wait()
            try:
                code = self.loop(groups)
            except SystemExit as leaving:
                if not isinstance(leaving.code, (int, type(None))):
                    raise
                code = leaving.code
            hub.stop(0 if code is None else int(code))
        except BaseException as error:
            hub.end(error, frame_of(error, __file__))

    # ---- every rank's main thread ----------------------------------------------------------------

    def _serve(self, end: RankEnd) -> int:
        """Calls, one at a time, until the loop says stop. Returns the loop's exit code."""
        while True:
            message = end.receive()
            if message["kind"] == "stop":
                end.begin("end.stop")
                self.stage = ("end", "stop")
                if self._guarded(end, lambda: self._leave_world(end)):
                    return message["code"]
                continue
            method = message.get("method", "build")
            self.stage = (message["role"], method)
            end.begin(f"{message['role']}.{method}")
            self._guarded(end, partial(self._carry_out, message))
            end.begin(f"idle after {message['role']}.{method}")

    def _carry_out(self, message: dict[str, Any]) -> Any:
        if message["kind"] == "build":
            return self.workers.build(message["role"])
        result = self.workers.call(message["role"], message["method"], message["kwargs"], message["rows"])
        return result if message["reply"] else None

    def _leave_world(self, end: RankEnd) -> None:
        self.workers.close()
        dist.destroy_process_group()
        end.retire()  # before the answer: from then on the loop may close its end at any time

    def _guarded(self, end: RankEnd, action: Callable[[], Any]) -> bool:
        """Do it and answer. What it raises (SystemExit too) goes to the loop, and this rank waits to be ended."""
        try:
            end.reply(action())
            return True
        except BaseException as error:
            kind, message, text = describe_exception(error)
            role, method = self.stage
            if self.redirected:
                print(f"{role}.{method} failed:\n{text}\n{kind}: {message}", file=sys.stderr, flush=True)
            header = f"Traceback on rank {self.job.rank}:"
            end.reply({"role": role, "method": method, "kind": kind, "message": message,
                       "remote_traceback": text.replace("Traceback (most recent call last):", header)}, b"error")
            return False

    # ---- every rank's watchdog thread ------------------------------------------------------------

    def _aborted(self) -> NoReturn:
        """The loop's process prints the cause; this one only goes."""
        self._exit(self._bystander_code())

    def _loop_is_lost(self, how: str) -> NoReturn:
        """Rank 0 is gone. The lowest rank that is left says so: the others wait a little longer and find it said."""
        if self.job.rank == 0:  # its hub has closed the socket and is about to exit
            threading.Event().wait()
        time.sleep(min(2.0, 0.05 * self.job.rank))
        error = RankLost(0, f"rank 0 (pool {next(iter(self.pools))}), which runs the loop, was lost: {how}")
        said = self.reporter.publish(self.endpoint.report_name, error)
        self._exit(EXIT_CODE if said else self._bystander_code())

    def _bystander_code(self) -> int:
        """0 where torchrun's one agent sees the rank at fault itself: its own summary then names only that one."""
        return 0 if self.job.agent_store and self.job.local_size == self.job.size else EXIT_CODE

    def _exit(self, code: int) -> NoReturn:
        flush_output()
        os._exit(code)
