"""Generation through the configured engine, resharding included, from synthetic prompts of given lengths.

    python benchmarks/rollout.py                                                # a tiny random model, one process
    torchrun --nproc-per-node 8 benchmarks/rollout.py CONFIG [key=value ...] [--rows 256] [--prompt 128:512]

CONFIG is a run's YAML: its model, degrees, engine and sampling are taken (the data are not). Prompts are random tokens;
responses end where the model ends them. Checked: the generation copy is bit-equal to the trainer's weights, the same
step samples the same tokens again, and sampler and trainer agree about log-probs. Rates count prompt and response
tokens; "response_tokens_per_s" counts the new ones alone. One record goes to benchmarks/results/rollout.jsonl; the last
line is the same as one JSON object.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.common import job, records  # noqa: E402
from rlhf_megatron import devices  # noqa: E402
from rlhf_megatron.config.checks import responses_per_step  # noqa: E402
from rlhf_megatron.data.proto import DataProto, Ragged  # noqa: E402
from rlhf_megatron.layouts.hf import read_spec  # noqa: E402
from rlhf_megatron.trainer import throughput  # noqa: E402

# One process on the demo's model: rows as long as its positions allow.
DEMO = ["data.max_prompt_tokens=48", "generation.max_response_tokens=80", "trainer.prompts_per_step=8",
        "trainer.mini_batch_size=0", "actor.micro_batch_size=8", "critic.micro_batch_size=8"]


def synthetic(config: Any, rows: int, prompt: tuple[int, int]) -> DataProto:
    """Prompts of random tokens, and a sample id per row."""
    draw = torch.Generator().manual_seed(config.trainer.seed)
    sizes = torch.randint(prompt[0], prompt[1] + 1, (rows,), generator=draw)
    tokens = torch.randint(0, read_spec(config.actor.model).vocab_size, (int(sizes.sum()),), generator=draw)
    return DataProto({"prompts": Ragged(tokens, sizes)}, {"sample_id": list(range(rows))})


def check(made: DataProto, first: DataProto, longest: int) -> None:
    """Between 1 and `longest` tokens a row with log-probs of at most 0, and the tokens of the first time."""
    lengths, log_probs = made["responses"].lengths, made["rollout_log_probs"].values
    assert 1 <= int(lengths.min()) and int(lengths.max()) <= longest
    assert bool(torch.isfinite(log_probs).all()) and float(log_probs.max()) <= 1e-6
    assert made["responses"].to_list() == first["responses"].to_list(), "the same step sampled other tokens"


def workers(config: Any) -> dict[str, type]:
    from benchmarks.common.workers import Actor

    return {"actor": Actor}


def main(argv: list[str] | None = None) -> None:
    options = job.parser(__doc__ or "").parse_args(argv)

    def loop(config: Any, groups: dict[str, Any]) -> dict[str, Any]:
        actor = groups["actor"]
        batch = synthetic(config, options.rows or responses_per_step(config),
                          options.prompt or (config.data.max_prompt_tokens,) * 2)
        first, _ = actor.generate(batch, step=1)
        assert actor.verify_generation_weights() == []
        comparable = config.generation.log_probs == "processed" or config.generation.temperature == 1.0
        gap = None
        if comparable and config.generation.top_p == 1.0 and config.generation.top_k == 0:
            scored = actor.log_probs(batch.union(first))["old_log_probs"]
            gap = float((scored.values - first["rollout_log_probs"].values).abs().mean())
            assert gap <= config.trainer.log_prob_gap_limit, f"sampler and trainer are {gap} nats apart"
        metrics: dict[str, Any] = {}

        def look(result: tuple[DataProto, dict[str, Any]]) -> None:
            check(result[0], first, config.generation.max_response_tokens)
            metrics.update(result[1])

        timings = job.measure([
            job.Phase("reshard", actor, lambda: actor.reshard(), lambda nothing: None),
            job.Phase("generate", actor, lambda: actor.generate(batch, step=1), look),
        ], options.warmup, options.repeats)
        # `generate` reshards, too: what is left of it is sampling
        whole, reshard = timings["generate"], timings["reshard"]
        timings["sample"] = job.Timing(max(whole.seconds - reshard.seconds, 1e-9), whole.memory_mb, whole.ranks)
        del timings["generate"]
        counted = throughput.Tokens.of(batch["prompts"].lengths.tolist(), first["responses"].lengths.tolist())
        flops = throughput.phase_flops(throughput.read_models(config), {"generate": counted})["generate"]
        peak = config.run.peak_tflops or devices.peak_tflops(config.run.dtype)
        return {
            "benchmark": "rollout", "hardware": records.hardware(actor.pool.size), "versions": records.versions(),
            "model": records.shape(config), "settings": records.settings(config, groups),
            "engine": config.generation.engine, "engine_batch_size": config.generation.batch_size,
            "rows": len(batch), "tokens": counted.total, "response_tokens": counted.scored,
            "repeats": options.repeats, "peak_tflops": peak, "log_prob_gap": gap,
            "response_tokens_per_s": counted.scored / whole.seconds,
            "reshard_bytes": {kind: int(metrics[f"reshard/bytes_{kind}"].value)
                              for kind in ("shared", "permuted", "moved")},
            "phases": records.rates(timings, counted.total, {"sample": flops}, actor.pool.size, peak),
        }

    figures = job.run(options, DEMO, workers, loop)
    if figures is not None:
        records.finish(figures, options.results)


if __name__ == "__main__":
    main()
