"""What every Megatron role does at start-up: read the model's shape, build the engine, load exactly its own slices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.layouts.flops import forward_flops
from rlhf_megatron.layouts.hf import read_spec
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.mcore.engine import MegatronEngine
from rlhf_megatron.mcore.model import norm_names
from rlhf_megatron.reshard import files
from rlhf_megatron.workers.base import MethodSpec, RankContext, Worker, method
from rlhf_megatron.workers.residency import Residency


def model_directory(role: str, config: Any) -> str:
    """The HF directory that a role starts from; a role without its own `model` starts from the actor's."""
    return getattr(config, role).model or config.actor.model


@cache
def _row_cost(model_dir: Path, head: str) -> tuple[float, float]:
    flops = forward_flops(read_spec(model_dir), head)
    return float(flops.per_token), float(flops.per_token_squared)


class MegatronWorker(Worker):
    """One rank of a role whose model is a Megatron model.

    Subclasses name the `head` ("lm" or "value") and whether the role is `trainable`.
    """

    head = "lm"
    trainable = False

    def __init__(self, role: str, config: Any, context: RankContext) -> None:
        super().__init__(role, config, context)
        settings = getattr(config, role)
        self.model_dir = model_directory(role, config)
        self.spec = read_spec(self.model_dir)
        how = settings.parallel
        self.parallel = ParallelLayout.build(context.size, how.tp, how.pp, how.cp, how.vpp, how.layers)
        self.layout = MegatronLayout(self.spec, self.parallel, head=self.head, norm_names=norm_names())
        self.engine = MegatronEngine(
            self.spec,
            self.parallel,
            head=self.head,
            trainable=self.trainable,
            dtype=config.run.dtype,
            micro_batch_size=settings.micro_batch_size,
            micro_batch_tokens=settings.micro_batch_tokens,
            packing=settings.packing,
            sequence_parallel=how.sp,
            recompute=settings.recompute if self.trainable else "none",
            overlap=self.trainable and settings.overlap,
            deterministic=config.run.deterministic,
            optimizer=settings.optimizer if self.trainable else None,
            total_steps=self.optimizer_steps(),
            seed=config.trainer.seed,
        )
        with torch.no_grad():
            files.load_hf(self.model_dir, self.layout, context.rank, self.engine.tensors())
        self.engine.weights_loaded()
        self.residency = Residency.of(context)
        self.residency.add(role, self.engine, settings.offload)

    def phase(self, spec: MethodSpec) -> AbstractContextManager[None]:
        """The call's parts are on the device, what may be away is away, and its memory is measured."""
        return self.residency.phase(self.role, spec)

    @classmethod
    def row_cost(cls, role: str, config: Any) -> tuple[float, float]:
        """Operations of a forward through the layers, by the model's shape; a backward multiplies all rows' alike.

        The head is left out: how many positions it scores is not known from a row's length alone.
        """
        return _row_cost(Path(model_directory(role, config)).resolve(), cls.head)

    def optimizer_steps(self) -> int:
        """Optimizer updates of the whole run: what a decaying learning-rate schedule is stretched over."""
        trainer = self.config.trainer
        responses = trainer.prompts_per_step * self.config.generation.samples_per_prompt
        minis = -(-responses // (trainer.mini_batch_size or responses))
        return trainer.steps * trainer.epochs * minis

    @method(split=None, needs=("parameters", "optimizer"))
    def save(self, directory: str) -> None:
        """Write model, optimizer and RNG state into `directory` (collective over the pool)."""
        self.engine.save(directory)

    @method(split=None, needs=("parameters", "optimizer"))
    def load(self, directory: str) -> None:
        """Load what `save` wrote; the parallel layout may differ (collective over the pool)."""
        self.engine.load(directory)

    @method(split=None, needs=("parameters",))
    def export(self, directory: str) -> str:
        """Write an HF checkpoint directory in the run's dtype (collective over the pool)."""
        files.save_hf(directory, self.layout, self.context.rank, self.engine.tensors(), source_dir=self.model_dir,
                      dtype=self.engine.dtype)
        return directory
