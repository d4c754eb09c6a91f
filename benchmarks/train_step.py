"""Scoring and learning: log-probs, the actor's update, the critic's update, on synthetic rows of given lengths.

    python benchmarks/train_step.py                                             # a tiny random model, one process
    torchrun --nproc-per-node 8 benchmarks/train_step.py CONFIG [key=value ...] [--rows 64] [--response 256:1024]

CONFIG is a run's YAML: its model, degrees, micro-batches, dtype and losses are taken (the data are not; the critic is
there if the algorithm has one). Rows are random tokens with lengths drawn evenly between LOW and HIGH. Counted are true
tokens and model FLOPs, without padding and recomputation, as in a run's perf/* metrics. Every result is checked. One
record goes to benchmarks/results/train_step.jsonl; the last line is the same as one JSON object.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.common import job, records  # noqa: E402
from rlhf_megatron import devices  # noqa: E402
from rlhf_megatron.algorithms.losses import denominator  # noqa: E402
from rlhf_megatron.config.checks import active_roles, responses_per_step  # noqa: E402
from rlhf_megatron.data.proto import DataProto, Ragged  # noqa: E402
from rlhf_megatron.layouts.hf import read_spec  # noqa: E402
from rlhf_megatron.trainer import gates, throughput  # noqa: E402

# One process on the demo's model: rows as long as its positions allow.
DEMO = ["data.max_prompt_tokens=48", "generation.max_response_tokens=80", "trainer.prompts_per_step=8",
        "trainer.mini_batch_size=32", "actor.micro_batch_size=8", "critic.micro_batch_size=8"]


def synthetic(config: Any, rows: int, prompt: tuple[int, int], response: tuple[int, int]) -> DataProto:
    """Random tokens, and random fields for what the losses read; every response token is valid."""
    draw = torch.Generator().manual_seed(config.trainer.seed)
    vocabulary = read_spec(config.actor.model).vocab_size

    def lengths(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (rows,), generator=draw)

    def tokens(sizes: torch.Tensor) -> Ragged:
        return Ragged(torch.randint(0, vocabulary, (int(sizes.sum()),), generator=draw), sizes)

    def noise(sizes: torch.Tensor) -> Ragged:
        return Ragged(torch.randn(int(sizes.sum()), generator=draw), sizes)

    before, after = lengths(*prompt), lengths(*response)
    return DataProto({
        "prompts": tokens(before), "responses": tokens(after),
        "response_mask": Ragged(torch.ones(int(after.sum()), dtype=torch.bool), after),
        **{name: noise(after) for name in ("advantages", "returns", "values")},
    })


def check_scores(batch: DataProto, scored: DataProto, vocabulary: int) -> None:
    """A log-prob of at most 0 and an entropy of at most log V for every response token."""
    log_probs, entropy = scored["old_log_probs"], scored["entropy"]
    assert log_probs.lengths.tolist() == entropy.lengths.tolist() == batch["responses"].lengths.tolist()
    assert bool(torch.isfinite(log_probs.values).all()) and float(log_probs.values.max()) <= 1e-6
    assert -1e-3 <= float(entropy.values.min()) and float(entropy.values.max()) <= math.log(vocabulary) + 1e-3


def check_update(role: str, metrics: dict[str, Any], tokens: int) -> None:
    """A finite loss over exactly `tokens` tokens, and an update that was made."""
    assert math.isfinite(metrics[f"{role}/loss"].value), metrics
    assert math.isfinite(metrics[f"{role}/grad_norm"].value) and metrics[f"{role}/grad_norm"].value >= 0
    assert metrics[f"{role}/clip_fraction"].denominator == tokens, (metrics[f"{role}/clip_fraction"], tokens)
    assert metrics[f"{role}/skipped"].value == metrics[f"{role}/not_finite_tokens"].value == 0


def workers(config: Any) -> dict[str, type]:
    from benchmarks.common.workers import Critic, Learner

    return {"actor": Learner} | ({"critic": Critic} if "critic" in active_roles(config) else {})


def main(argv: list[str] | None = None) -> None:
    parser = job.parser(__doc__ or "")
    parser.add_argument("--response", type=job.span,
                        help="tokens of a response, N or LOW:HIGH; default: the upper half of what the config allows")
    options = parser.parse_args(argv)

    def loop(config: Any, groups: dict[str, Any]) -> dict[str, Any]:
        actor, critic = groups["actor"], groups.get("critic")
        longest = config.generation.max_response_tokens
        rows = options.rows or config.trainer.mini_batch_size or responses_per_step(config)
        batch = synthetic(config, rows, options.prompt or (config.data.max_prompt_tokens,) * 2,
                          options.response or (max(1, longest // 2), longest))
        counted = throughput.Tokens.of(batch["prompts"].lengths.tolist(), batch["responses"].lengths.tolist())
        spec = read_spec(config.actor.model)
        before = actor.log_probs(batch).select(["old_log_probs"])
        batch = batch.union(before).union(before.rename({"old_log_probs": "ref_log_probs"}))
        batch.meta["denominator"] = denominator(batch["response_mask"].pad(False), config.algorithm.loss_aggregation)
        first = actor.update(batch)  # before training: the update must score as log_probs does
        check_update("actor", first, counted.scored)
        assert abs(first["actor/ratio_max"].value - 1.0) <= gates.RATIO_TOLERANCE, first["actor/ratio_max"]
        phases = [
            job.Phase("old_log_prob", actor, lambda: actor.log_probs(batch),
                      lambda scored: check_scores(batch, scored, spec.vocab_size)),
            job.Phase("update_actor", actor, lambda: actor.update(batch),
                      lambda metrics: check_update("actor", metrics, counted.scored)),
        ]
        if critic is not None:
            phases.append(job.Phase("update_critic", critic, lambda: critic.update(batch),
                                    lambda metrics: check_update("critic", metrics, counted.scored)))
        timings = job.measure(phases, options.warmup, options.repeats)
        flops = throughput.phase_flops(throughput.read_models(config), dict.fromkeys(timings, counted))
        peak = config.run.peak_tflops or devices.peak_tflops(config.run.dtype)
        ranks = len({rank for group in groups.values() for rank in group.pool.ranks})
        return {
            "benchmark": "train_step", "hardware": records.hardware(ranks), "versions": records.versions(),
            "model": records.shape(config), "settings": records.settings(config, groups),
            "rows": rows, "tokens": counted.total, "response_tokens": counted.scored, "repeats": options.repeats,
            "peak_tflops": peak, "phases": records.rates(timings, counted.total, flops, ranks, peak),
        }

    figures = job.run(options, DEMO, workers, loop)
    if figures is not None:
        records.finish(figures, options.results)


if __name__ == "__main__":
    main()
