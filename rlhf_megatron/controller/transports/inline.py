"""One process: the loop calls the workers directly.

No threads and no sockets, so a debugger can step from the loop into a worker and back; torch.distributed still has a
world (of one rank).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_megatron import devices
from rlhf_megatron.controller.errors import block, loop_error
from rlhf_megatron.controller.pools import LaunchError, ResourcePool, pool_of
from rlhf_megatron.controller.serve import Workers
from rlhf_megatron.controller.worker_group import WorkerGroup
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.workers.base import RankContext, Worker

_WORLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class _Done:
    """A call that has already run."""

    def __init__(self, result: Any, span: tuple[float, float]) -> None:
        self._result, self.span = result, span

    def done(self) -> bool:
        return True

    def wait(self) -> dict[int, Any]:
        return {0: self._result}


class InlineTransport:
    """Runs a call where it is made. An exception of a worker comes out of the call, with its own traceback."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def call(
        self, pool: ResourcePool, role: str, method: str, kwargs: dict[str, Any], rows: Mapping[int, DataProto],
        wanted: tuple[int, ...],
    ) -> _Done:
        began = time.monotonic()
        result = self._workers.call(role, method, kwargs, rows.get(0))
        return _Done(result, (began, time.monotonic()))


def run(
    config: Any, roles: Mapping[str, type[Worker]], loop: Callable[[dict[str, WorkerGroup]], int | None],
    log_folder: str | Path | None = None, prepare: Callable[[], None] = lambda: None,
) -> int:
    """Prepare, build the roles in this process, run the loop, return its exit code (None counts as 0).

    Exceptions pass through; with a log folder their text is also written to `<log_folder>/errors/`. What the
    environment says about ranks (left over from a launcher) is overruled while the loop runs.

    Raises:
        LaunchError: a pool wants more than one rank, or this process is already part of a larger world.
    """
    pools = _pools(config.cluster.pools)
    own_world = not dist.is_initialized()
    if not own_world and dist.get_world_size() > 1:
        raise LaunchError(f"cluster.transport=inline, but this process is in a world of {dist.get_world_size()} ranks; "
                          "use cluster.transport=torchrun")
    saved = {name: os.environ.get(name) for name in _WORLD}
    os.environ.update(_WORLD)
    seed = getattr(getattr(config, "trainer", None), "seed", 0)
    workers = Workers(config, roles, RankContext(rank=0, size=1, pool=next(iter(pools)), job_rank=0, seed=seed))
    try:
        if own_world:
            dist.init_process_group(devices.backend(), store=dist.HashStore(), rank=0, world_size=1,
                                    timeout=timedelta(seconds=config.cluster.collective_timeout))
        prepare()
        groups = {}
        for role, worker_cls in roles.items():
            groups[role] = WorkerGroup(role, worker_cls, config, pool_of(role, config, pools), InlineTransport(workers))
            workers.build(role)
        code = loop(groups)
        workers.close()
        return 0 if code is None else code
    except Exception as error:
        if log_folder is not None:
            _keep(error, Path(log_folder))
        raise
    finally:
        if own_world and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _pools(sizes: Mapping[str, int]) -> dict[str, ResourcePool]:
    """Every pool is this process: a config with several pools of one rank can be stepped through as well."""
    for name, size in sizes.items():
        if size > 1:
            raise LaunchError(f"cluster.transport=inline is one process, but cluster.pools.{name} wants {size} ranks; "
                              "set it to 1, or start with torchrun and cluster.transport=torchrun")
    return {name: ResourcePool(name, (0,)) for name in sizes}


def _keep(error: Exception, folder: Path) -> None:
    path = folder / "errors" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block(loop_error(error)), encoding="utf-8")
    except OSError:
        pass  # the exception itself is on its way; a full disk must not replace it
