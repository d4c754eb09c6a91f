"""One GPU in at most eight minutes, with plain torch: what of the project's own CUDA paths can be checked without vLLM,
transformer-engine or apex.

    python benchmarks/gpu_check.py [--seconds 480] [--parts log_probs,permute,update]

log_probs   the log-prob kernel against fp32 logits of everything at once, bf16: time, peak memory, values, gradients
permute     qkv and gate_up from Megatron's rows to the generation engine's, by a plan, against a plain copy: GB/s
update      scoring and updates of a Llama-3.2-1B-shaped actor: megatron-core's local spec with SDPA (flash) attention,
            bf16 with fp32 masters, through the engine: tokens/s, MFU (needs megatron-core; its wheel is enough)

A part that fails is told and does not keep the others from running; the exit code is then 1. Without a GPU nothing is
run, the exit code is 0 and the figures say "not run". The last line is one JSON object, which is also kept as
benchmarks/results/gpu_check.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.common import records  # noqa: E402
from rlhf_megatron import devices  # noqa: E402
from rlhf_megatron.layouts import HFLayout, MegatronLayout, ModelSpec, ParallelLayout, make_plan  # noqa: E402
from rlhf_megatron.layouts.flops import TRAINING, forward_flops  # noqa: E402

NOT_RUN = "not run: no GPU"
LLAMA_1B = ModelSpec("llama", num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_heads=32, num_kv_heads=8,
                     head_dim=64, vocab_size=128256, max_positions=8192, norm_eps=1e-5, rope_theta=5e5, tied=True)
LLAMA_8B_PART = ModelSpec("llama", num_layers=8, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8,
                          head_dim=128, vocab_size=1024, max_positions=8192)  # eight of its layers, a small vocabulary
SIZES: dict[str, dict[str, Any]] = {
    "log_probs": {"positions": 8192, "hidden": 4096, "vocab": 128256, "repeats": 5},
    "permute": {"spec": LLAMA_8B_PART, "repeats": 10},
    "update": {"spec": LLAMA_1B, "rows": 64, "prompt": 256, "response": 768, "micro_batch_size": 8, "repeats": 5},
}


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `repeats` calls after one that warms up; the device is waited for."""
    seconds = []
    for _ in range(repeats + 1):
        devices.synchronize()
        started = time.perf_counter()
        work()
        devices.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def peak_mb(work: Callable[[], Any]) -> float | None:
    """MiB that the work holds at most beyond what is held before it; None on a CPU, where torch does not count."""
    if not devices.is_cuda():
        return None
    devices.synchronize()
    devices.reset_memory_peak()
    before = devices.memory_peak_mb()
    work()
    devices.synchronize()
    return devices.memory_peak_mb() - before


# ---- the log-prob kernel ----


def log_probs(positions: int, hidden: int, vocab: int, repeats: int, dtype: torch.dtype = torch.bfloat16
              ) -> dict[str, Any]:
    """Log-probs and entropy of [positions, hidden] states, forward and backward, ours and the naive form."""
    from rlhf_megatron.mcore.logprobs import vocab_parallel_log_probs

    device, draw = devices.device(), torch.Generator().manual_seed(0)
    states = torch.randn(positions, hidden, generator=draw).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=draw) / hidden**0.5).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocab, (positions,), generator=draw).to(device)

    def naive() -> tuple[torch.Tensor, torch.Tensor]:
        log_p = (states @ weight.t()).float().log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        found, entropy = vocab_parallel_log_probs(states, weight, targets, None, vocab)
        assert entropy is not None
        return found, entropy

    def both_ways(kernel: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        found, entropy = kernel()
        gradients = torch.autograd.grad(found.sum() + 0.01 * entropy.sum(), (states, weight))
        return [found.detach(), entropy.detach(), *gradients]

    # logits of the two are products of different shapes and round apart: by bf16's step at their size, some 2^-6
    wide = dtype == torch.float32
    for mine, exact in zip(both_ways(ours)[:2], both_ways(naive)[:2], strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-4 if wide else 0.06, rtol=1e-4 if wide else 1e-2)
    apart = max(float((mine - exact).float().norm() / exact.float().norm())
                for mine, exact in zip(both_ways(ours)[2:], both_ways(naive)[2:], strict=True))
    assert apart < (1e-4 if wide else 0.03), f"gradients are {apart} apart"
    seconds = {name: timed(lambda k=kernel: both_ways(k), repeats)  # type: ignore[misc]
               for name, kernel in (("ours", ours), ("naive", naive))}
    return {
        "positions": positions, "hidden": hidden, "vocab": vocab, "ours_s": seconds["ours"],
        "naive_s": seconds["naive"], "ratio_naive": seconds["naive"] / seconds["ours"],
        "extra_mb": peak_mb(lambda: both_ways(ours)), "extra_naive_mb": peak_mb(lambda: both_ways(naive)),
        "gradients_apart": apart,
    }


# ---- the local permutation ----


def permute(spec: ModelSpec, repeats: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """qkv [q..q k v] per group -> [all q; all k; all v], and gate_up, of all layers, by a plan of one rank."""
    from rlhf_megatron.reshard.execute import execute

    device, parallel = devices.device(), ParallelLayout()
    source = MegatronLayout(spec, parallel)
    plan = make_plan(source, HFLayout(spec), dtype.itemsize)
    local = {name: torch.randn(shape, device=device).to(dtype) for name, shape in source.local_shapes(0).items()}
    target: dict[str, torch.Tensor] = {}
    for copy in (copy for now in plan.for_rank(0).rounds for copy in now.copies):
        if local[copy.source].shape == plan.shapes[copy.target]:
            target[copy.target] = local[copy.source]  # the same bytes: storage that is shared is left alone
    for layer in range(spec.num_layers):  # one buffer for the parts of a fused weight, as an engine keeps them
        for block, parts in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            names = [f"model.layers.{layer}.{block}.{part}.weight" for part in parts]
            rows = [plan.shapes[name][0] for name in names]
            fused = torch.empty(sum(rows), spec.hidden_size, dtype=dtype, device=device)
            target |= dict(zip(names, fused.split(rows), strict=True))
    copied = execute(plan, local, target).copied
    for layer in range(spec.num_layers):
        fused = local[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
        grouped = fused.view(spec.num_kv_heads, spec.heads_per_group + 2, spec.head_dim, spec.hidden_size)
        where = f"model.layers.{layer}.self_attn"
        for part, rows in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
            assert torch.equal(target[f"{where}.{part}_proj.weight"], rows.reshape(-1, spec.hidden_size))
        gate_up = local[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
        halves = [target[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(torch.cat(halves), gate_up)
    flat = torch.empty(copied, dtype=torch.uint8, device=device)
    other = torch.zeros_like(flat)
    seconds = timed(lambda: execute(plan, local, target), repeats)
    plain = timed(lambda: flat.copy_(other), repeats)
    return {"mb": copied / 1e6, "seconds": seconds, "gb_per_s": copied / seconds / 1e9,
            "copy_gb_per_s": copied / plain / 1e9, "of_copy": plain / seconds}


# ---- scoring and updating ----


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group(devices.backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def update(spec: ModelSpec, rows: int, prompt: int, response: int, micro_batch_size: int, repeats: int,
           dtype: str = "bfloat16") -> dict[str, Any]:
    """log_probs and PPO updates of `rows` rows through MegatronEngine on one rank; random weights."""
    from rlhf_megatron.algorithms import registry
    from rlhf_megatron.config.schema import AlgorithmConfig, OptimizerConfig
    from rlhf_megatron.data.proto import DataProto, Ragged
    from rlhf_megatron.mcore.engine import MegatronEngine
    from rlhf_megatron.mcore.model import uses_transformer_engine

    assert not uses_transformer_engine(), "transformer-engine is installed: this part is about the local spec"
    draw = torch.Generator().manual_seed(0)
    before, after = torch.full((rows,), prompt), torch.full((rows,), response)

    def tokens(sizes: torch.Tensor) -> Ragged:
        return Ragged(torch.randint(0, spec.vocab_size, (int(sizes.sum()),), generator=draw), sizes)

    batch = DataProto({
        "prompts": tokens(before), "responses": tokens(after),
        "response_mask": Ragged(torch.ones(rows * response, dtype=torch.bool), after),
        "advantages": Ragged(torch.randn(rows * response, generator=draw), after),
    }, meta={"denominator": float(rows * response)})
    loss = registry.get("ppo").actor_loss(AlgorithmConfig(name="ppo"))
    with world_of_one():
        engine = MegatronEngine(spec, ParallelLayout(), dtype=dtype, micro_batch_size=micro_batch_size,
                                optimizer=OptimizerConfig(lr=1e-6), total_steps=repeats + 2)
        with torch.no_grad():
            for name, tensor in engine.tensors().items():
                tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02)
        engine.weights_loaded()
        scored = engine.forward(batch)
        assert scored is not None
        old = scored["log_probs"]
        assert bool(torch.isfinite(old.values).all()) and float(old.values.max()) <= 1e-6
        batch = batch.union(DataProto({"old_log_probs": old}))
        first = engine.train_step(batch, loss)
        assert math.isfinite(first["actor/loss"].value) and first["skipped"].value == 0
        assert abs(first["actor/ratio_max"].value - 1.0) <= 0.01, "the update does not score as forward does"
        assert math.isfinite(first["grad_norm"].value) and first["grad_norm"].value > 0
        devices.reset_memory_peak()
        forward_s = timed(lambda: engine.forward(batch), repeats)
        update_s = timed(lambda: engine.train_step(batch, loss), repeats)
        memory = devices.memory_peak_mb()
        after_updates = engine.forward(batch)
        assert after_updates is not None and not torch.equal(after_updates["log_probs"].values, old.values)
        parameters = sum(tensor.numel() for tensor in engine.tensors().values())
    length = prompt + response
    flops = forward_flops(spec).total(rows * length, rows * length**2, rows * response)
    peak = devices.peak_tflops(dtype)
    found = {"parameters": parameters, "rows": rows, "prompt": prompt, "response": response, "memory_peak_mb": memory}
    for name, seconds, worth in (("log_probs", forward_s, 1), ("update", update_s, TRAINING)):
        tflops = worth * flops / seconds / 1e12
        found[name] = {"seconds": seconds, "tokens_per_s": rows * length / seconds, "tflops": tflops,
                       "mfu": tflops / peak if peak else None}
    return found


# ---- all of it ----

PARTS: dict[str, Callable[..., dict[str, Any]]] = {"log_probs": log_probs, "permute": permute, "update": update}


def run_parts(names: list[str], sizes: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Each part's figures, or why there are none. What is running when the time is over is broken off."""
    found: dict[str, Any] = {}

    def over(*_: Any) -> None:
        raise TimeoutError(f"broken off: the {seconds:g} s of --seconds are over")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                found[name] = PARTS[name](**sizes[name])
            except TimeoutError as error:
                found[name] = {"error": str(error)}
                break
            except ImportError as error:
                found[name] = {"error": f"not run: {error}"}
            except Exception as error:
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found | {name: {"error": "not run: no time was left"} for name in names if name not in found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="time for all parts")
    parser.add_argument("--parts", default=",".join(PARTS), help="names of parts, with commas between them")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the figures")
    options = parser.parse_args(argv)
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts {unknown[0]!r}: the parts are {', '.join(PARTS)}")
    figures: dict[str, Any] = {"gpu_check": NOT_RUN, "versions": records.versions()}
    if devices.gpu_count():
        devices.choose("cuda")
        figures |= {"hardware": records.hardware(1), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        figures |= run_parts(names, SIZES, options.seconds)
        failed = [name for name in names if "error" in figures[name]]
        figures["gpu_check"] = f"failed: {', '.join(failed)}" if failed else "passed"
    else:
        print("gpu_check needs one GPU: torch sees none here, so nothing was run")
    text = json.dumps(records.rounded(figures))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "gpu_check.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return 1 if figures["gpu_check"].startswith("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
