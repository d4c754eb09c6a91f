"""What one update of an engine does under a split: gradients, weights, losses, put together to canonical tensors.

`python -m splits docs/splits.md` (from tests/) measures all of SPLITS and writes the table.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engines import ACTOR, CRITIC, GRPO_ACTOR, LinearLoss, denominator, example_batch, make_engine, my_rows
from ranks import run_ranks
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ParallelLayout
from tiny import join, read_out, relative, settings, tiny_spec

# name -> head, loss, how its denominator counts
LOSSES = {
    "ppo actor": ("lm", ACTOR, "token_mean"),
    "ppo critic": ("value", CRITIC, "token_mean"),
    "grpo": ("lm", GRPO_ACTOR, "seq_mean_token_mean"),  # with KL in the loss and an entropy bonus
    "linear": ("lm", LinearLoss(), "token_mean"),
}
MASKED_ROW = 5


class Split(NamedTuple):
    ranks: int = 1
    degrees: tuple[tuple[str, Any], ...] = ()  # of ParallelLayout.build
    options: tuple[tuple[str, Any], ...] = ()  # of MegatronEngine

    def layout(self) -> ParallelLayout:
        return ParallelLayout.build(self.ranks, **dict(self.degrees))


def split(ranks: int, **more: Any) -> Split:
    degrees = {name: more.pop(name) for name in ("tp", "pp", "cp", "vpp", "layers") if name in more}
    return Split(ranks, tuple(degrees.items()), tuple(more.items()))


SPLITS = {
    "TP2": split(2, tp=2),
    "TP2 SP": split(2, tp=2, sequence_parallel=True),
    "PP2": split(2, pp=2),
    "PP2 VPP2": split(2, pp=2, vpp=2),
    "PP2 3+1 layers": split(2, pp=2, layers=(3, 1)),
    "CP2": split(2, cp=2),
    "DP2": split(2),
    "TP2 CP2 SP": split(4, tp=2, cp=2, sequence_parallel=True),
    "PP2 VPP2 CP2": split(4, pp=2, vpp=2, cp=2),
    "TP2 PP2 DP2 SP": split(8, tp=2, pp=2, sequence_parallel=True),
}
BATCHINGS = {  # rows, tokens, packing
    f"{form} {name}": dict(micro=rows, tokens=tokens, packing=form == "packed")
    for form in ("padded", "packed")
    for name, rows, tokens in (("1", 1, 0), ("2", 2, 0), ("4", 4, 0), ("28 tokens", 1, 28))
}


def _scores(rank: int, head: str, tied: bool) -> torch.Tensor:
    engine, _ = make_engine(tiny_spec(tied=tied), ParallelLayout.build(1), head, 8, trainable=False)
    (scores,) = (field.values for field in engine.forward(example_batch(), temperature=0.7).tensors.values())
    return scores


@cache
def _scored(head: str, tied: bool) -> torch.Tensor:
    return run_ranks(1, _scores, head, tied)[0]


def rollout(name: str, tied: bool = False, masked_row: bool = False) -> DataProto:
    """What a real step trains on: scores of the same model on one rank, a few updates away from the weights."""
    head, _, aggregation = LOSSES[name]
    batch = example_batch()
    exact, noise = _scored(head, tied), torch.Generator().manual_seed(5)
    fields = {"values": 0.2, "returns": 1.0} if head == "value" else {"old_log_probs": 0.2, "ref_log_probs": 0.2}
    for field, distance in fields.items():
        valid = ~batch[field].values.isnan()
        moved = exact + distance * torch.randn(len(exact), generator=noise)
        batch[field].values[valid] = moved[valid]
    if masked_row:
        first = int(batch["responses"].lengths[:MASKED_ROW].sum())
        batch["response_mask"].values[first : first + int(batch["responses"].lengths[MASKED_ROW])] = False
    batch.meta["denominator"] = denominator(batch, aggregation)
    return batch


def _update(rank: int, layout: ParallelLayout, name: str, batch: DataProto, batchings: list[dict], tied: bool,
            options: dict) -> list[dict]:
    """For each batching: gradients and weights of one SGD update at lr 1."""
    head, loss, _ = LOSSES[name]
    found = []
    for batching in batchings:
        engine, where = make_engine(tiny_spec(tied=tied), layout, head, optimizer=settings(name="sgd", lr=1.0,
                                    clip_grad=0.0), **batching, **options)
        engine.keep_gradients = True
        report = engine.train_step(my_rows(batch, engine), loss, temperature=0.7, entropy=name == "grpo")
        found.append({
            "gradients": read_out(where, rank, engine.gradients()), "sgd": read_out(where, rank, engine.tensors()),
            "norm": report["grad_norm"].value,
        })
    return found


def updates(how: Split, name: str, batchings: list[dict], tied: bool = False) -> list[dict]:
    """`_update` under a split, for each batching, as canonical tensors; copies on several ranks must agree."""
    layout = how.layout()
    results = run_ranks(how.ranks, _update, layout, name, rollout(name, tied, masked_row=True), batchings, tied,
                        dict(how.options), timeout=120)
    where = MegatronLayout(tiny_spec(tied=tied), layout, head=LOSSES[name][0])
    whole = []
    for per_rank in zip(*results, strict=True):
        assert len({found["norm"] for found in per_rank}) == 1, "ranks disagree about the norm"
        whole.append({kind: join(where, [found[kind] for found in per_rank], 1e-5) for kind in ("gradients", "sgd")}
                     | {"norm": per_rank[0]["norm"]})
    return whole


@cache
def exact(name: str, tied: bool = False) -> dict:
    """The same in one process, all rows padded in one micro-batch."""
    return updates(Split(), name, [dict(micro=8)], tied)[0]


def differences(ours: dict, reference: dict) -> dict[str, float]:
    """The largest max|a - b| / max|b| over the tensors of each kind."""
    return {kind: max(relative(ours[kind][name], tensor) for name, tensor in reference[kind].items())
            for kind in ("gradients", "sgd")}


def table() -> str:
    lines = [
        "# What a split changes", "",
        "Written by `make splits`; do not edit. One update in fp32 on a llama of 4 layers, compared with the same",
        "update in one process (rows padded, one micro-batch): the largest max|a - b| / max|b| over all parameters,",
        f"over {len(BATCHINGS)} ways to form micro-batches ({', '.join(BATCHINGS)}),",
        "of the gradients and of the weights after SGD with learning rate 1. Rows have 2 to 20 tokens; one is fully",
        "masked. The tests demand less than 1e-5.", "",
        "| split | ranks | " + " | ".join(f"{name}: gradients | weights" for name in list(LOSSES)[:3]) + " |",
        "|---|---|" + "---|" * 6,
    ]
    for title, how in {"one process": Split(), **SPLITS}.items():
        cells = []
        for name in list(LOSSES)[:3]:
            found = [differences(ours, exact(name)) for ours in updates(how, name, list(BATCHINGS.values()))]
            cells += [f"{max(f[kind] for f in found):.1e}" for kind in ("gradients", "sgd")]
        lines.append(f"| {title} | {how.ranks} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(table(), encoding="utf-8")
    print(f"table: {target}")
