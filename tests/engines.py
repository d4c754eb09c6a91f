"""Engines on tiny models for tests: a batch with everything that losses read, and the real losses by name."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.algorithms import registry
from rlhf_megatron.config.schema import AlgorithmConfig, KLConfig
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.mcore.engine import MegatronEngine
from rlhf_megatron.observe.metrics import Mean
from tiny import VOCAB, canonical, lay_in

LENGTHS = [(1, 9), (12, 1), (5, 3), (3, 17), (2, 2), (7, 6), (1, 1), (9, 4)]  # prompt, response tokens of each row

PPO = AlgorithmConfig(name="ppo", value_clip=0.2)
GRPO = AlgorithmConfig(name="grpo", entropy_coefficient=0.01, loss_aggregation="seq_mean_token_mean",
                       kl=KLConfig(place="loss", estimator="k3", coefficient=0.1))
ACTOR = registry.get("ppo").actor_loss(PPO)
CRITIC = registry.get("ppo").critic_loss(PPO)
GRPO_ACTOR = registry.get("grpo").actor_loss(GRPO)


class LinearLoss:
    """Weighted log-probs. Unlike a ratio it has no exponential that would enlarge the rounding of bf16."""

    reads = ("response_mask", "advantages")

    def __call__(self, outputs, fields, meta):
        mask = fields["response_mask"]
        total = -(outputs["log_probs"][mask] * fields["advantages"][mask]).sum()
        return total / meta["denominator"], {"actor/loss": Mean(total.item(), mask.sum().item())}


def example_batch(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0,
                  aggregation: str = "token_mean") -> DataProto:
    """Rows of uneven length, about a fifth of the tokens masked, NaN in every float under the mask."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([r for _, r in lengths])
    total = int(sizes.sum())
    mask = torch.rand(total, generator=generator) > 0.2
    batch = DataProto(tensors={
        "prompts": Ragged.from_list([torch.randint(0, VOCAB, (p,), generator=generator) for p, _ in lengths]),
        "responses": Ragged(torch.randint(0, VOCAB, (total,), generator=generator), sizes),
        "response_mask": Ragged(mask, sizes),
        "old_log_probs": Ragged(-3.6 + 0.1 * torch.randn(total, generator=generator), sizes),
        "advantages": Ragged(torch.randn(total, generator=generator), sizes),
        "returns": Ragged(torch.randn(total, generator=generator), sizes),
        "values": Ragged(torch.randn(total, generator=generator), sizes),
        "ref_log_probs": Ragged(-3.6 + 0.1 * torch.randn(total, generator=generator), sizes),
    })
    for name in ("old_log_probs", "advantages", "returns", "values", "ref_log_probs"):
        batch[name].values[~mask] = math.nan
    batch.meta["denominator"] = denominator(batch, aggregation)
    return batch


def denominator(batch: DataProto, aggregation: str = "token_mean") -> float:
    from rlhf_megatron.algorithms.losses import denominator as of_mask

    return of_mask(batch["response_mask"].pad(False), aggregation)


def make_engine(spec, layout, head="lm", micro=2, optimizer=None, seed=0, dtype="float32",
                trainable=True, tokens=0, **more) -> tuple[MegatronEngine, MegatronLayout]:
    """An engine with the canonical random weights of `seed`, and its layout."""
    engine = MegatronEngine(spec, layout, head=head, trainable=trainable, dtype=dtype, micro_batch_size=micro,
                            micro_batch_tokens=tokens, optimizer=optimizer if trainable else None, total_steps=10,
                            seed=3, **more)
    where = MegatronLayout(spec, layout, head=head)
    lay_in(where, dist.get_rank(), canonical(where, seed), engine.tensors())
    engine.weights_loaded()
    return engine, where


def my_rows(batch: DataProto, engine: MegatronEngine) -> Any:
    """This replica's rows; uneven on purpose: the first replica has one row more than the others."""
    dp, rows = engine.layout.dp, len(batch)
    sizes = [rows // dp + (i < rows % dp) for i in range(dp)]
    if dp > 1:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return batch.split(sizes)[engine.coordinates.dp]
