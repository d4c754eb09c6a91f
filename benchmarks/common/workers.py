"""The project's workers with what a benchmark asks of them besides. Import only when the device has been chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron import devices
from rlhf_megatron.algorithms import registry
from rlhf_megatron.workers.actor import ActorWorker
from rlhf_megatron.workers.base import RankContext, method
from rlhf_megatron.workers.critic import CriticWorker
from rlhf_megatron.workers.roles import MegatronWorker


class Settles:
    """Mixin: wait for all ranks of the pool."""

    @method(split=None)
    def settle(self, start: bool) -> float:
        """Peak memory in MiB of the rank with the most since the last start; `start` begins anew. Collective."""
        devices.synchronize()
        peak = torch.tensor([devices.memory_peak_mb()], dtype=torch.float64, device=devices.device())
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if start:
            devices.reset_memory_peak()
        return float(peak)


class Actor(Settles, ActorWorker):
    """The actor with its generation engine."""

    @method(split=None)
    def reshard(self) -> None:
        """Enter generation and leave it again."""
        with self.session:
            pass


class Learner(Settles, ActorWorker):
    """The actor without a generation engine: nothing is sampled, and the engine's copy would count as memory."""

    def __init__(self, role: str, config: Any, context: RankContext) -> None:
        MegatronWorker.__init__(self, role, config, context)
        self.loss = registry.get(config.algorithm.name).actor_loss(config.algorithm)


class Critic(Settles, CriticWorker):
    """The critic."""
