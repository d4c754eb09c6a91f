"""Pools of ranks, and how one process joins the job: the launcher's environment, the job's store, the pool's world.

Every pool is its own torch.distributed world under a prefix of the job's store: nothing that is collective over WORLD
can wait for ranks of another pool.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlhf_megatron import devices

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LaunchError(RuntimeError):
    """The process cannot join the job; the message names the variable, host or number and what to change."""


@dataclass(frozen=True)
class ResourcePool:
    """A named set of job ranks. The index of a rank in `ranks` is its rank in the pool's world."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


def parse_pools(sizes: Mapping[str, int], job_size: int) -> dict[str, ResourcePool]:
    """Consecutive ranks for each pool, in the order of the config. Size 0 (one pool at most): all ranks that remain.

    Raises:
        LaunchError: the sizes do not add up to the job's size; both numbers are named.
    """
    if not sizes:
        raise LaunchError("cluster.pools is empty: name one pool, for example {main: 0}")
    open_ended = [name for name, size in sizes.items() if size == 0]
    fixed = sum(sizes.values())
    text = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    if any(size < 0 for size in sizes.values()):
        raise LaunchError(f"cluster.pools {{{text}}}: a pool has at least 0 ranks (0 = all that remain)")
    if len(open_ended) > 1:
        raise LaunchError(f"cluster.pools {{{text}}}: only one pool may have size 0 (all ranks that remain)")
    if fixed > job_size or (open_ended and fixed == job_size) or (not open_ended and fixed != job_size):
        need = f"at least {fixed + 1}" if open_ended else f"{fixed}"
        raise LaunchError(f"cluster.pools {{{text}}} needs {need} ranks but the job has {job_size}; change the pools "
                          "or the number of processes that the launcher starts")
    pools, first = {}, 0
    for name, size in sizes.items():
        count = size or job_size - fixed
        pools[name] = ResourcePool(name, tuple(range(first, first + count)))
        first += count
    return pools


@dataclass(frozen=True)
class JobEnvironment:
    """What the launcher told this process. `agent_store`: torchrun's agent hosts the store at host:port."""

    rank: int
    size: int
    local_size: int
    host: str
    port: int
    agent_store: bool
    life: int

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> JobEnvironment:
        """Raises LaunchError when the launcher's variables are missing or contradict each other."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not environment.get(name)]
        if missing:
            raise LaunchError(
                f"cluster.transport=torchrun needs the launcher's {', '.join(needed)}; missing: {', '.join(missing)}. "
                "Start with torchrun or one of the scripts in launch/, or set cluster.transport=inline (one process)"
            )
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_size = int(environment.get("LOCAL_WORLD_SIZE", 0))
            life = int(environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_RESTART_COUNT") or 0)
        except ValueError as error:
            raise LaunchError(f"an environment variable of the launcher is not a number: {error}") from None
        if not 0 <= rank < size:
            raise LaunchError(f"RANK={rank} is outside 0..WORLD_SIZE-1={size - 1}; a variable of another job is left "
                              "in the environment")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, size, local_size, environment["MASTER_ADDR"], port, agent, life)

    @property
    def one_host(self) -> bool:
        """All ranks are on this machine: everything can stay on the loopback interface."""
        return self.host in LOOPBACK or self.local_size == self.size

    def store(self, timeout: float) -> dist.Store:
        """The job's store under this life's prefix. Keep it: where rank 0 hosts it, it must be the last to leave.

        Raises:
            LaunchError: the port is taken, or nobody answers; host and port are named.
        """
        hosts_it = not self.agent_store and self.rank == 0
        try:
            base = _bounded(timeout + 5.0, lambda: dist.TCPStore(
                self.host, self.port, world_size=None, is_master=hosts_it, timeout=timedelta(seconds=timeout),
                wait_for_workers=False))
        except (RuntimeError, ValueError) as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
            first = str(error).splitlines()[0]
            if hosts_it:
                raise LaunchError(
                    f"rank 0 cannot listen on {self.host}:{self.port} ({first}). Another process holds the port, or "
                    "the address is not of this host; give the launcher another MASTER_PORT"
                ) from None
            raise LaunchError(
                f"rank {self.rank} waited {timeout:g} s for the job's store at {self.host}:{self.port} ({first}); is "
                "the process that hosts it running there, and does a firewall let the port through?"
            ) from None
        return dist.PrefixStore(f"life{self.life}", base)

    def listen_address(self) -> str:
        """Where the loop listens: loopback on one host, else this host's address towards the others."""
        if self.one_host:
            return "127.0.0.1"
        try:
            address = socket.getaddrinfo(self.host, None, socket.AF_INET)[0][4][0]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.bind((address, 0))  # fails where MASTER_ADDR is another host
                except OSError:
                    probe.connect((address, 9))  # sends nothing: asks which interface leads there
                return probe.getsockname()[0]
        except OSError as error:
            raise LaunchError(f"MASTER_ADDR={self.host} does not resolve here ({error}); use an address") from None


def _bounded(seconds: float, action: Callable[[], Any]) -> Any:
    """action() with a limit of our own: a store's client waits for ever where the port is held by something else."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise RuntimeError("whatever listens there does not answer as a store does")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def join_world(pool: ResourcePool, job: JobEnvironment, store: dist.Store, timeout: float) -> None:
    """Make the pool this process's torch.distributed world, also for libraries that read RANK and WORLD_SIZE.

    LOCAL_RANK stays as it is: it names the device.
    """
    rank = pool.ranks.index(job.rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(pool.size))
    if job.one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(devices.backend(), store=dist.PrefixStore(f"pool/{pool.name}", store), rank=rank,
                            world_size=pool.size, timeout=timedelta(seconds=timeout))


def die_with_parent() -> None:
    """Linux: this process is killed when the launcher that started it dies, so that no rank is left behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


def pool_of(role: str, config: Any, pools: Mapping[str, ResourcePool]) -> ResourcePool:
    """The pool that a role's config names. Raises LaunchError when there is none of that name."""
    name = getattr(config, role).pool
    if name not in pools:
        raise LaunchError(f"{role}.pool={name!r} is not one of cluster.pools: {', '.join(pools)}")
    return pools[name]
