"""The main job on the tiny demo model, whole: one run in every placement, replay, resume, refusal, stale weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs import arguments, metrics, run_job, run_loop, succeeded
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.observe import timeline
from rlhf_megatron.train import loop as train_loop
from rlhf_megatron.workers.actor import ActorWorker
from rlhf_megatron.workers.reference import ReferenceWorker

# placement -> (ranks, overrides)
PLACEMENTS = {
    "inline": (1, ["--single"]),
    "torchrun 1": (1, ["{all}.tp=1", "{all}.pp=1"]),
    "torchrun 2": (2, ["{all}.tp=2", "{all}.pp=1"]),
    "torchrun 4": (4, ["{all}.tp=1", "{all}.pp=2"]),
    "torchrun 4 sp": (4, ["{all}.tp=2", "{all}.pp=2", "{all}.sp=true", "actor.recompute=full"]),
}
# every role with a layout of its own, in one pool and in two
MIXED = {
    "actor tp2pp2, critic pp2dp2, reference dp4": (4, [
        "critic.parallel.tp=1", "reference.parallel.tp=1", "reference.parallel.pp=1", "reference.micro_batch_size=4",
    ]),
    "actor pp2vpp2cp2 packed by tokens, critic tp2cp2 packed, reference uneven pp2": (4, [
        "actor.parallel={tp: 1, pp: 2, vpp: 2, cp: 2}", "actor.packing=true", "actor.micro_batch_tokens=64",
        "critic.parallel={tp: 2, pp: 1, cp: 2}", "critic.packing=true", "critic.overlap=true",
        "reference.parallel={tp: 1, pp: 2, layers: [3, 1]}", "reference.micro_batch_tokens=64",
    ]),
    "actor tp2pp2 on four ranks, critic and reference on the next two": (6, [
        "cluster.pools={a: 4, b: 2}", "actor.pool=a", "critic.pool=b", "reference.pool=b", "critic.parallel.tp=1",
        "reference.parallel.pp=1",
    ]),
    "critic and reference on two ranks, actor tp2pp2 on the next four": (6, [
        "cluster.pools={b: 2, a: 4}", "actor.pool=a", "critic.pool=b", "reference.pool=b", "critic.parallel.pp=1",
        "reference.parallel={tp: 1, pp: 1}",
    ]),
    "actor tp2 on two ranks, critic and reference on a third": (3, [
        "cluster.pools={a: 2, b: 1}", "actor.pool=a", "critic.pool=b", "reference.pool=b", "{all}.pp=1",
        "critic.parallel.tp=1", "reference.parallel.tp=1",
    ]),
}


@pytest.fixture(scope="session")
def recorded(demo, tmp_path_factory) -> Path:
    """Three steps in one process whose rollouts are saved: what all other placements are held against."""
    runs = tmp_path_factory.mktemp("runs")
    succeeded(run_job(arguments(demo, runs, "inline", "--single", "trainer.rollouts.save=true"), ranks=1))
    return runs


@pytest.mark.timeout(240)
@pytest.mark.parametrize("placement", [p for p in PLACEMENTS if p != "inline"])
def test_every_placement_samples_the_same_tokens(demo, recorded, tmp_path, placement):
    ranks, overrides = PLACEMENTS[placement]
    one_step = ["trainer.steps=1", "trainer.rollouts.save=true"]
    succeeded(run_job(arguments(demo, tmp_path, "run", *overrides, *one_step), ranks))
    expected = DataProto.load(recorded / "inline" / "rollouts" / "step_000001")
    found = DataProto.load(tmp_path / "run" / "rollouts" / "step_000001")
    assert found["responses"].to_list() == expected["responses"].to_list()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("placement", [p for p in PLACEMENTS | MIXED if p != "inline"])
def test_replayed_rollouts_give_equal_metrics_in_every_placement(demo, recorded, tmp_path, placement):
    ranks, overrides = (PLACEMENTS | MIXED)[placement]
    replay = f"trainer.rollouts.replay={recorded}/inline/rollouts"
    succeeded(run_job(arguments(demo, tmp_path, "run", *overrides, replay), ranks))
    expected, found = metrics(recorded, "inline"), metrics(tmp_path, "run")
    assert len(found) == 3
    for one, other in zip(expected, found, strict=True):
        for name in one:
            if name.startswith(("reward/", "kl/", "actor/", "critic/", "response/")):
                assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-5), (name, one["step"])
    _check_timeline(tmp_path / "run", pools={"a", "b"} if "cluster.pools" in overrides[0] else set())


def _check_timeline(run: Path, pools: set[str]) -> None:
    """Calls of one pool follow each other; of two pools, critic and actor are updated at the same time."""
    calls = timeline.read(run)
    assert {call["pool"] for call in calls} == (pools or {"main"})
    spans = {name: [(call["ts"], call["ts"] + call["dur"]) for call in calls if call["name"] == name]
             for name in ("actor.update", "critic.update", "actor.log_probs", "critic.values", "reference.log_probs")}
    assert [len(spans[name]) for name in spans] == [6, 6, 3, 3, 3]
    for actor, critic in zip(spans["actor.update"], spans["critic.update"], strict=True):
        both = min(actor[1], critic[1]) - max(actor[0], critic[0])
        # in one pool a rank may turn to the next call while another still answers
        assert (both > 0.5 * min(actor[1] - actor[0], critic[1] - critic[0])) == bool(pools), (actor, critic)


@pytest.mark.timeout(240)
def test_sampler_and_trainer_agree_and_every_replica_generates_its_share(demo, recorded):
    for line in metrics(recorded, "inline"):
        assert line["rollout/log_prob_gap"] < 1e-5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [("tp=2", "pp=2"), ("tp=2", "pp=1")], ids=["tp2pp2", "tp2dp2"])
def test_generation_weights_are_bit_equal_after_every_reshard_and_new_weights_are_used(demo, tmp_path, layout):
    def loop(config, groups) -> int:
        from rlhf_megatron.trainer.run import Run

        run = Run(config, groups)
        actor, critic, reference = groups["actor"], groups["critic"], groups["reference"]
        for step in run.steps():
            batch = run.rollout(actor, step)
            shares = run.metrics.current["rollout/rows_per_replica"].value
            assert shares == len(batch) / 4, shares
            assert actor.verify_generation_weights() == []
            batch = run.score(batch)
            batch = batch.union(actor.log_probs(batch))
            gap = (batch["old_log_probs"].values - batch["rollout_log_probs"].values).abs().mean().item()
            assert gap < 1e-5, gap
            batch = batch.union(reference.log_probs(batch)).union(critic.values(batch))
            batch = run.advantages(batch)
            for mini in run.mini_batches(batch, step):
                actor.update(mini)
            assert actor.verify_generation_weights() != []  # the trainer has moved on: the check can fail
            run.end_step(step, batch)
        print("checked", step)
        return 0

    result = run_loop(arguments(demo, tmp_path, "run", *(f"{{all}}.{degree}" for degree in layout), "trainer.steps=3",
                                "actor.optimizer.lr=1e-2"), 4, loop)
    succeeded(result)
    assert "checked 3" in result.output


@pytest.mark.timeout(240)
def test_stale_generation_weights_raise_the_gap_and_warn(demo, tmp_path):
    class StaleActor(ActorWorker):
        """Enters generation without resharding after the first step."""

        def generate(self, batch, step, greedy=False):
            if step > 1:
                self.session = _NoReshard(self.generator)
            return super().generate(batch, step=step, greedy=greedy)

    def loop(config, groups) -> int:
        from rlhf_megatron.train import loop as train_loop

        return train_loop(config, groups)

    common = ["{all}.tp=1", "{all}.pp=1", "actor.optimizer.lr=3e-2", "trainer.steps=3"]
    stale = run_loop(arguments(demo, tmp_path, "stale", *common), 1, loop, workers={"actor": StaleActor})
    healthy = run_loop(arguments(demo, tmp_path, "healthy", *common), 1, loop)
    succeeded(stale)
    succeeded(healthy)
    assert "rollout/log_prob_gap" in stale.output and "stale" in stale.output
    assert "log_prob_gap_limit" not in healthy.output
    assert metrics(tmp_path, "stale")[-1]["rollout/log_prob_gap"] > 0.05
    assert metrics(tmp_path, "healthy")[-1]["rollout/log_prob_gap"] < 1e-5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_first_step_is_checked_against_its_known_answers(demo, tmp_path, ranks):
    """A run whose update scores at another temperature, and whose reference holds other weights, is warned about."""

    class Warmer(ActorWorker):
        def update(self, batch):
            score = self.engine.train_step
            self.engine.train_step = lambda *args, **more: score(*args, **{**more, "temperature": 1.5})
            return super().update(batch)

    class Other(ReferenceWorker):
        def __init__(self, role, config, context):
            super().__init__(role, config, context)
            for tensor in self.engine.tensors().values():
                tensor.mul_(1.5)

    layout = ["--single"] if ranks == 1 else []
    common = arguments(demo, tmp_path, "run", *layout, "trainer.steps=2")
    healthy = run_job(common, ranks)
    wrong = run_loop(common, ranks, train_loop, workers={"actor": Warmer, "reference": Other})
    succeeded(healthy)
    succeeded(wrong)
    assert "warning" not in healthy.output
    assert "warning: step 1: actor/ratio_max" in wrong.output and "warning: step 1: kl/ref" in wrong.output
    assert "warning: step 2" not in wrong.output  # known answers are those of the first step alone


class _NoReshard:
    """Stands in for a generation session that forgets to bring the weights over."""

    def __init__(self, engine):
        self.engine = engine

    def __enter__(self):
        self.engine.wake()

    def __exit__(self, *error):
        self.engine.sleep()


@pytest.mark.timeout(300)
def test_resume_continues_exactly_and_at_another_layout(demo, tmp_path):
    straight = ["{all}.tp=2", "{all}.pp=1", "trainer.save_every=2", "trainer.steps=4", "trainer.keep=1"]
    succeeded(run_job(arguments(demo, tmp_path, "straight", *straight), 2))
    succeeded(run_job(arguments(demo, tmp_path, "parts", *straight[:3], "trainer.steps=2"), 2))
    succeeded(run_job(arguments(demo, tmp_path, "parts", *straight, "trainer.resume=auto"), 2))
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").glob("step_*")] == ["step_000004"]
    moved = ["{all}.tp=1", "{all}.pp=2", "trainer.steps=4",
             "trainer.resume=" + str(tmp_path / "moved" / "checkpoints" / "step_000002")]
    succeeded(run_job(arguments(demo, tmp_path, "moved", *straight[:3], "trainer.steps=2"), 2))
    succeeded(run_job(arguments(demo, tmp_path, "moved", *moved), 2))
    expected = metrics(tmp_path, "straight")
    for name, tolerance in (("parts", 0.0), ("moved", 2e-5)):
        found = metrics(tmp_path, name)
        assert [line["step"] for line in found] == [1, 2, 3, 4]
        for one, other in zip(expected, found, strict=True):
            for key in one:
                if key.startswith(("reward/", "kl/", "actor/", "critic/", "response/")):
                    assert other[key] == pytest.approx(one[key], abs=tolerance, rel=tolerance), (name, key, one["step"])
    fresh = run_job(arguments(demo, tmp_path, "parts", *straight[:3], "trainer.steps=2"), 2)
    succeeded(fresh)
    kept = {name: [p.name for p in (tmp_path / "parts" / name).glob("step_*")]
            for name in ("checkpoints", "checkpoints.1")}
    assert kept == {"checkpoints": ["step_000002"], "checkpoints.1": ["step_000004"]}
    assert "checkpoints.1" in fresh.output
    refused = run_job(arguments(demo, tmp_path, "parts", *straight, "trainer.resume=auto", "algorithm.lam=0.5"), 2)
    assert all(code != 0 for code in refused.codes) and "algorithm.lam" in refused.output


@pytest.mark.timeout(120)
def test_a_refused_config_ends_all_ranks_with_one_message(demo, tmp_path):
    result = run_job(arguments(demo, tmp_path, "run", "{all}.tp=3", "trainer.mini_batch_size=7"), 4)
    assert result.codes == [2, 2, 2, 2]
    assert result.output.count("refused") == 1
    assert "tp" in result.output and "mini_batch_size" in result.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.timeout(240)
def test_the_exported_checkpoint_loads_in_transformers_in_the_dtype_of_the_run(demo, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one_step = ["{all}.tp=2", "{all}.pp=2", "trainer.steps=1", "trainer.save_hf=end", "run.dtype=bfloat16"]
    succeeded(run_job(arguments(demo, tmp_path, "run", *one_step), 4))
    final = tmp_path / "run" / "hf" / "final"
    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.dtype == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exported, original = (AutoTokenizer.from_pretrained(folder)("aaa:") for folder in (final, demo / "model"))
    assert exported["input_ids"] == original["input_ids"]
    assert (tmp_path / "run" / "report.png").stat().st_size > 1000
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.timeout(240)
def test_a_run_with_everything_offloaded_is_the_same_to_the_bit(demo, tmp_path):
    """Every role in a layout of its own over the same two ranks; two updates a step, saved and exported."""
    common = ["{all}.tp=2", "{all}.pp=1", "critic.parallel.tp=1", "reference.parallel={tp: 1, pp: 2}",
              "trainer.steps=2", "trainer.save_every=2", "trainer.save_hf=end", "trainer.prompts_per_step=4",
              "trainer.mini_batch_size=8"]
    everything = [f"{role}.offload=[parameters, gradients, optimizer]" for role in ("actor", "critic")]
    for name, more in (("here", []), ("away", [*everything, "reference.offload=[parameters]"])):
        succeeded(run_job(arguments(demo, tmp_path, name, *common, *more), 2))
    for one, other in zip(metrics(tmp_path, "here"), metrics(tmp_path, "away"), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if not key.startswith(("timing/", "perf/")):
                assert one[key] == other[key], (key, one["step"])
        phases = {key for key in one if key.startswith("perf/memory_peak_mb_")}
        assert phases == {f"perf/memory_peak_mb_{phase}" for phase in (
            "actor_generate", "actor_log_probs", "reference_log_probs", "critic_values", "critic_update",
            "actor_update")}
        assert one["perf/memory_peak_mb"] == max(one[key] for key in phases)
        assert one["perf/memory_offloaded_mb"] == 0 < other["perf/memory_offloaded_mb"]
    here, away = tmp_path / "here", tmp_path / "away"
    written = [*here.rglob("*.distcp"), *(here / "hf").rglob("*.safetensors")]
    assert len(written) > 4
    for path in written:
        assert path.read_bytes() == (away / path.relative_to(here)).read_bytes(), path


@pytest.mark.timeout(240)
def test_a_deterministic_run_gives_the_same_bits_twice(demo, tmp_path):
    class Checked(ActorWorker):
        def update(self, batch):
            assert torch.are_deterministic_algorithms_enabled() and self.engine.model.config.deterministic_mode
            return super().update(batch)

    given = ["{all}.tp=1", "{all}.pp=2", "actor.packing=true", "run.deterministic=true", "trainer.save_hf=end",
             "trainer.steps=2"]
    for name in ("one", "two"):
        succeeded(run_loop(arguments(demo, tmp_path, name, *given), 2, train_loop, workers={"actor": Checked}))
    for one, two in zip(metrics(tmp_path, "one"), metrics(tmp_path, "two"), strict=True):
        assert all(one[key] == two[key] for key in one if not key.startswith(("timing/", "perf/")))
    (weights,) = (tmp_path / "one" / "hf" / "final").glob("*.safetensors")
    assert weights.read_bytes() == (tmp_path / "two" / "hf" / "final" / weights.name).read_bytes()


@pytest.mark.timeout(240)
def test_throughput_is_that_of_the_tokens_of_the_step(demo, tmp_path):
    """Two epochs on three ranks in two pools: counted again from the saved rollout, and divided by all ranks."""
    ranks, overrides = MIXED["actor tp2 on two ranks, critic and reference on a third"]
    given = ["trainer.steps=2", "trainer.epochs=2", "trainer.critic_warmup_steps=1", "trainer.rollouts.save=true",
             "run.peak_tflops=0.5"]
    succeeded(run_job(arguments(demo, tmp_path, "run", *overrides, *given), ranks))
    hidden, ffn, vocabulary, layers, query, both = 128, 384, 259, 4, 4 * 32, 2 * 2 * 32
    per_token = 2 * layers * (hidden * (query + both) + query * hidden + 3 * hidden * ffn)
    for line in metrics(tmp_path, "run"):
        batch = DataProto.load(tmp_path / "run" / "rollouts" / f"step_{line['step']:06d}")
        lengths, scored = batch["prompts"].lengths + batch["responses"].lengths, int(batch["responses"].lengths.sum())
        body = per_token * int(lengths.sum()) + 2 * layers * query * int((lengths**2).sum())
        forward, values = body + 2 * hidden * vocabulary * scored, body + 2 * hidden * scored
        # generation, log-probs, reference, values; two epochs of both updates, but of the critic's alone in step 1
        flops = 3 * forward + values + 2 * 3 * values + (2 * 3 * forward if line["step"] == 2 else 0)
        seconds = line["timing/step"]
        assert line["perf/tflops_per_gpu"] == pytest.approx(flops / seconds / 3 / 1e12, rel=1e-12)
        assert line["perf/mfu"] == pytest.approx(line["perf/tflops_per_gpu"] / 0.5, rel=1e-12)
        assert line["perf/tokens_per_second_per_gpu"] == pytest.approx(int(lengths.sum()) / seconds / 3, rel=1e-12)
