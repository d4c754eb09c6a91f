"""Process groups of one role's layout, without megatron-core's global ones.

Several roles with different layouts live in one process. Each has its own ProcessGroupCollection, passed explicitly;
the few functions of megatron-core that still read `parallel_state` do so inside `use`, which shows them the role's
groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import random as tp_random  # noqa: E402

# Which name of parallel_state each group of the collection stands behind.
_GROUP_NAMES = {
    "tp": "_TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "_PIPELINE_MODEL_PARALLEL_GROUP",
    "mp": "_MODEL_PARALLEL_GROUP",
    "embd": "_EMBEDDING_GROUP",
    "pos_embd": "_POSITION_EMBEDDING_GROUP",
    "dp": "_DATA_PARALLEL_GROUP",
    "cp": "_CONTEXT_PARALLEL_GROUP",
    "tp_cp": "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "dp_cp": "_DATA_PARALLEL_GROUP_WITH_CP",
    "tp_dp_cp": "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "_EXPERT_MODEL_PARALLEL_GROUP",
    "expt_tp": "_EXPERT_TENSOR_PARALLEL_GROUP",
    "tp_ep": "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "tp_ep_pp": "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "expt_dp": "_EXPERT_DATA_PARALLEL_GROUP",
    "intra_dp_cp": "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "intra_expt_dp": "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "intra_dist_opt": "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
_RANK_NAMES = {
    "tp": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "pp": "_PIPELINE_GLOBAL_RANKS",
    "dp": "_DATA_PARALLEL_GLOBAL_RANKS",
    "cp": "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "dp_cp": "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "mp": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "ep": "_EXPERT_MODEL_PARALLEL_RANKS",
}
_STATE = [
    name for name in vars(parallel_state) if name.startswith("_") and name[1:2].isupper() and "BUFFER" not in name
]

# Groups by their ranks. They belong to the default world that made them: a new world starts with none.
_cache: dict[tuple[int, ...], dist.ProcessGroup] = {}
_cache_world: dist.ProcessGroup | None = None


def build_groups(layout: ParallelLayout, seed: int = 1) -> ProcessGroupCollection:
    """All groups that megatron-core asks for, of this rank. Collective over the whole world, everywhere in one order.

    Equal rank lists share one group, between roles too. `seed` is of the role's random streams.
    """
    rank = dist.get_rank()
    if rank not in layout.ranks:
        raise ValueError(f"rank {rank} is not in the layout's ranks {layout.ranks}: a role spans its whole pool")
    stages = layout.groups("pp")
    everyone = [layout.ranks]
    alone = [(r,) for r in layout.ranks]
    tp, pp, dp_cp = _group(layout.groups("tp")), _group(stages), _group(layout.groups("cp", "dp"))
    single = _group(alone)
    groups = ProcessGroupCollection(
        tp=tp, pp=pp, cp=_group(layout.groups("cp")), dp=_group(layout.groups("dp")),
        mp=_group(layout.groups("tp", "pp")), tp_cp=_group(layout.groups("tp", "cp")), dp_cp=dp_cp,
        tp_dp_cp=_group(layout.groups("tp", "cp", "dp")),
        # Without experts: the expert grid is one expert rank wide, tensor ranks become data ranks.
        ep=single, expt_tp=single, tp_ep=single, tp_ep_pp=pp, expt_dp=_group(layout.groups("tp", "cp", "dp")),
        intra_dp_cp=dp_cp, intra_expt_dp=_group(layout.groups("tp", "cp", "dp")), inter_dist_opt=None, hcp=None,
        # The distributed optimizer sums its norm over this one: all ranks of the layout, which need not be the world.
        intra_dist_opt=_group(everyone),
        embd=_group([tuple(sorted({stage[0], stage[-1]})) for stage in stages]),
        pos_embd=_group([(stage[0],) for stage in stages]),
    )
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    with use(groups, layout):
        tp_rank = layout.coordinates(dist.get_rank()).tp
        tp_random.model_parallel_cuda_manual_seed(seed, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
        _trackers[id(groups)] = (groups, tp_random._CUDA_RNG_STATE_TRACKER)
    return groups


# id(collection) -> (the collection, kept alive so that its id stays its own; its random streams)
_trackers: dict[int, tuple[ProcessGroupCollection, Any]] = {}


@contextlib.contextmanager
def use(groups: ProcessGroupCollection, layout: ParallelLayout) -> Iterator[None]:
    """Inside, `parallel_state` and the random-stream tracker are the role's; outside, what they were before."""
    before = {name: getattr(parallel_state, name) for name in _STATE}
    tracker = tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    try:
        for name, value in before.items():
            setattr(parallel_state, name, {} if isinstance(value, dict) else None)
        for field, name in _GROUP_NAMES.items():
            setattr(parallel_state, name, getattr(groups, field))
        for field, name in _RANK_NAMES.items():
            setattr(parallel_state, name, dist.get_process_group_ranks(getattr(groups, field)))
        if layout.vpp > 1:  # asked for by what counts layers; which chunk is meant is passed explicitly
            parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = layout.vpp
        if layout.cp == 1:
            parallel_state._TENSOR_AND_DATA_PARALLEL_GROUP = groups.tp_dp_cp
        own = _trackers.get(id(groups))
        tp_random._CUDA_RNG_STATE_TRACKER = own[1] if own else None
        tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = own is not None
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
        tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker


def _group(rank_lists: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """This rank's group among disjoint rank lists; every rank of the world makes all of them, in the same order."""
    global _cache_world
    if _cache_world is not dist.group.WORLD:
        _cache.clear()
        _cache_world = dist.group.WORLD
    mine = None
    for ranks in rank_lists:
        ranks = tuple(sorted(ranks))
        if ranks not in _cache:
            _cache[ranks] = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = _cache[ranks]
    return mine
