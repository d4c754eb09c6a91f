"""The actor: trains in the Megatron layout, generates in the inference layout, in the same processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.algorithms import registry
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.generation.embedded import EmbeddedEngine
from rlhf_megatron.generation.engine import Sampling
from rlhf_megatron.layouts.hf import HFLayout
from rlhf_megatron.layouts.plan import make_plan
from rlhf_megatron.observe.metrics import Max, Mean, Metric
from rlhf_megatron.reshard import verify
from rlhf_megatron.reshard.session import GenerationSession
from rlhf_megatron.workers.base import RankContext, method
from rlhf_megatron.workers.roles import MegatronWorker


class ActorWorker(MegatronWorker):
    """One rank of the trained policy, with the generation engine of this rank beside it."""

    trainable = True

    def __init__(self, role: str, config: Any, context: RankContext) -> None:
        super().__init__(role, config, context)
        self.loss = registry.get(config.algorithm.name).actor_loss(config.algorithm)
        self.generator = EmbeddedEngine(
            self.model_dir, dtype=config.run.dtype, batch_size=config.generation.batch_size
        )
        self.plan = make_plan(self.layout, HFLayout(self.spec, self.parallel.ranks))
        self.session = GenerationSession(self.engine.tensors, self.plan, self.generator)

    @method(reads=("prompts", "sample_id"), split="generate", needs=("parameters",),
            returns=("responses", "rollout_log_probs", "response_mask", "finish_reason"))
    def generate(self, batch: DataProto, step: int, greedy: bool = False) -> tuple[DataProto, dict[str, Metric]]:
        """Reshard, sample one response per row, go back.

        Returns `responses`, `rollout_log_probs` and `response_mask`, ragged over the response (EOS included), and per
        row `finish_reason` ("stop" or "length"); the metrics count what the reshard shared, permuted and moved.
        """
        settings = self.config.generation
        sampling = Sampling(
            max_tokens=settings.max_response_tokens,
            temperature=0.0 if greedy else settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=tuple(settings.stop),
            log_probs=settings.log_probs,
            seed=self.config.trainer.seed,
            step=step,
        )
        with self.session:
            completions = self.generator.generate(batch["prompts"].to_list(), list(batch["sample_id"]), sampling)
        lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
        flat = [token for c in completions for token in c.token_ids]
        log_probs = [value for c in completions for value in c.log_probs]
        out = DataProto(
            tensors={
                "responses": Ragged(torch.tensor(flat, dtype=torch.int64), lengths),
                "rollout_log_probs": Ragged(torch.tensor(log_probs, dtype=torch.float32), lengths),
                "response_mask": Ragged(torch.ones(len(flat), dtype=torch.bool), lengths),
            },
            non_tensors={"finish_reason": [c.finish_reason for c in completions]},
        )
        return out, {
            "reshard/bytes_shared": Mean(self.plan.bytes_shared, 1),
            "reshard/bytes_permuted": Mean(self.plan.bytes_permuted, 1),
            "reshard/bytes_moved": Mean(self.plan.bytes_moved, 1),
            "rollout/rows_per_replica": Max(len(batch)),
        }

    @method(reads=("prompts", "responses"), returns=("old_log_probs", "entropy"), split="train",
            needs=("parameters",))
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """`old_log_probs` and `entropy` [B, R] ragged, fp32, at the sampling temperature."""
        scored = self.engine.forward(batch, temperature=self.config.generation.temperature, entropy=True)
        return None if scored is None else scored.rename({"log_probs": "old_log_probs"})

    @method(reads=("prompts", "responses", "response_mask", "old_log_probs", "advantages"),
            optional=("ref_log_probs", "rollout_log_probs", "returns"), split="train")
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer update on a mini-batch whose meta carries the global denominator."""
        metrics = self.engine.train_step(
            batch,
            self.loss,
            temperature=self.config.generation.temperature,
            entropy=self.config.algorithm.entropy_coefficient != 0.0,
        )
        metrics |= self.residency.report(self.replica_group("train"))
        return {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}

    @method(split=None, needs=("parameters",))
    def verify_generation_weights(self) -> list[str]:
        """Names of tensors whose generation copy is not bit-equal to the trainer's (empty: all equal). Collective."""
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        return verify.compare(self.plan, self.engine.tensors(), self.generator.tensors(), group)
