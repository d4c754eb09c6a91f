"""The critic: values of every response position, and the value update."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.algorithms import registry
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.observe.metrics import Metric
from rlhf_megatron.workers.base import RankContext, method
from rlhf_megatron.workers.roles import MegatronWorker


class CriticWorker(MegatronWorker):
    """A Megatron model with a value head. Starts from an HF checkpoint; a missing value head starts at zero."""

    head = "value"
    trainable = True

    def __init__(self, role: str, config: Any, context: RankContext) -> None:
        super().__init__(role, config, context)
        make_loss = registry.get(config.algorithm.name).critic_loss
        if make_loss is None:
            raise ValueError(f"algorithm {config.algorithm.name} wants values but has no critic_loss to learn them by")
        self.loss = make_loss(config.algorithm)

    @method(reads=("prompts", "responses"), returns=("values",), split="train", needs=("parameters",))
    def values(self, batch: DataProto) -> DataProto | None:
        """`values` [B, R] ragged, fp32: the expected return before each response token."""
        return self.engine.forward(batch)

    @method(reads=("prompts", "responses", "response_mask", "values", "returns"), split="train")
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer update on a mini-batch whose meta carries the global denominator."""
        metrics = self.engine.train_step(batch, self.loss)
        metrics |= self.residency.report(self.replica_group("train"))
        return {name if "/" in name else f"critic/{name}": metric for name, metric in metrics.items()}
