"""Resharding: time and bytes of Megatron TP x PP -> a full copy on every rank, checked bit for bit.

    python benchmarks/reshard.py [--ranks 4] [--tp 2] [--pp 2] [--dtype bfloat16] [--repeats 5]  # gloo, forked here
    torchrun --nproc-per-node 4 benchmarks/reshard.py [...]                                      # the device's backend

Without arguments: a random model of about 85 MB in bf16 on four gloo ranks. "bare" is the time of the same bytes as
one contiguous message per pair of ranks, without packing. Every repeat starts from changed weights. The last line is
one JSON object (seconds are the median of the repeats, each the slowest rank's).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron import devices
from rlhf_megatron.layouts import HFLayout, MegatronLayout, ModelSpec, ParallelLayout, make_plan
from rlhf_megatron.layouts.plan import RankPlan
from rlhf_megatron.reshard import Staging, compare
from rlhf_megatron.reshard.execute import execute, view


def model(options: argparse.Namespace) -> ModelSpec:
    hidden = options.hidden
    return ModelSpec("llama", options.layers, hidden, 3 * hidden, hidden // 64, max(hidden // 128, 1), 64,
                     options.vocab, 2048)


def measure(rank: int, options: argparse.Namespace) -> dict[str, object]:
    """One rank's part; every rank returns the same figures."""
    spec, world, device = model(options), dist.get_world_size(), devices.device()
    dtype = getattr(torch, options.dtype)
    source = MegatronLayout(spec, ParallelLayout.build(world, tp=options.tp, pp=options.pp))
    started = time.perf_counter()
    plan = make_plan(source, HFLayout(spec, world), dtype.itemsize, options.round_mb * 10**6)
    mine = plan.for_rank(rank)
    plan_ms = (time.perf_counter() - started) * 1e3

    draw = torch.Generator().manual_seed(0)  # the same canonical weights on every rank, to check against
    weights = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in plan.shapes.items()}
    local = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in source.local_shapes(rank).items()}
    target = {name: torch.full(shape, float("nan"), dtype=dtype, device=device) for name, shape in plan.shapes.items()}
    messages, staging, seconds, bare = bare_messages(mine, dtype, device), Staging(), [], []
    for _ in range(options.repeats + 1):  # the first one warms up
        for name, tensor in weights.items():
            weights[name] = -tensor
        for box, name, offset, _ in source.placements(rank):
            region = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            view(local[name], offset, box.size).copy_(weights[box.tensor][region])
        seconds.append(timed(lambda: execute(plan, local, target, staging=staging)))
        bare.append(timed(lambda: exchange(messages)))
        wrong = [name for name in weights if not torch.equal(target[name].cpu(), weights[name])]
        assert not wrong, f"rank {rank}: not bit-equal: {wrong[:5]}"
    checking = timed(lambda: compare(plan, local, target))
    assert compare(plan, local, target) == []
    size = sum(tensor.nbytes for tensor in weights.values())
    took, least = statistics.median(seconds[1:]), statistics.median(bare[1:])
    return {"benchmark": "reshard", "case": f"TP{options.tp} PP{options.pp} -> {world} full copies",
            "backend": devices.backend(), "dtype": options.dtype, "model_mb": round(size / 1e6, 1), "ranks": world,
            "rounds": plan.num_rounds, "plan_ms": round(plan_ms, 1), "reshard_s": round(took, 4),
            "bare_s": round(least, 4), "over_bare": round(took / least, 2),
            "received_mb_per_rank": round(plan.bytes_moved / world / 1e6, 1),
            "staging_mb": round(staging.nbytes / 1e6, 1),
            "received_mb_per_s": round(plan.bytes_moved / world / 1e6 / took), "compare_s": round(checking, 4),
            "bit_equal": True}


def timed(work) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    devices.synchronize()
    started = time.perf_counter()
    work()
    devices.synchronize()
    took = torch.tensor([time.perf_counter() - started], device=devices.device())
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def bare_messages(mine: RankPlan, dtype: torch.dtype, device: torch.device) -> list[dist.P2POp]:
    """The plan's bytes as one contiguous message per pair of ranks."""
    operations = []
    for kind, name in ((dist.irecv, "receives"), (dist.isend, "sends")):
        counts: dict[int, int] = {}
        for now in mine.rounds:
            for peer, pieces in getattr(now, name).items():
                counts[peer] = counts.get(peer, 0) + sum(piece.elements for piece in pieces)
        operations += [dist.P2POp(kind, torch.ones(count, dtype=dtype, device=device), group_peer=peer)
                       for peer, count in counts.items()]
    return operations


def exchange(messages: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 4), ("tp", 2), ("pp", 2), ("hidden", 512), ("layers", 8), ("vocab", 16384),
                        ("repeats", 5), ("round-mb", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices.choose()
        dist.init_process_group(devices.backend())
        figures, first = measure(dist.get_rank(), options), dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from ranks import run_ranks  # the tests' launcher: imports once, forks the ranks
        devices.choose("cpu")
        figures, first = run_ranks(options.ranks, measure, options, timeout=300)[0], True
    if first:
        for name, value in figures.items():
            print(f"{name:>22}  {value}")
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
