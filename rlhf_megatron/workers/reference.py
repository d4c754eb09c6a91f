"""The reference: a frozen copy of the starting policy. It is not built when no term of the run asks for it."""

from __future__ import annotations

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.workers.base import method
from rlhf_megatron.workers.roles import MegatronWorker


class ReferenceWorker(MegatronWorker):
    """Frozen Megatron model; scores responses at the sampling temperature, like the actor."""

    @method(reads=("prompts", "responses"), returns=("ref_log_probs",), split="train", needs=("parameters",))
    def log_probs(self, batch: DataProto) -> DataProto | None:
        """`ref_log_probs` [B, R] ragged, fp32."""
        scored = self.engine.forward(batch, temperature=self.config.generation.temperature)
        return None if scored is None else scored.select(("log_probs",)).rename({"log_probs": "ref_log_probs"})
