"""A config against the job: pools, degrees, batch rules, models, files; every refusal with its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_megatron.config import checks
from rlhf_megatron.config.load import ConfigError, parse_config
from rlhf_megatron.config.schema import Config, ParallelConfig
from test_config_load import BASE

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64,
         "vocab_size": 300, "max_position_embeddings": 1024}
Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A config that fits: world 8, TP2 x PP2 -> DP2, 32 prompts x 8 = 256 responses, mini-batches of 64, micro 4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "model").mkdir()

    def build(*overrides: str, **model: object) -> Config:
        (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | model))
        fitting = ("actor.parallel={tp: 2, pp: 2}", "trainer.prompts_per_step=32", "generation.samples_per_prompt=8",
                   "trainer.mini_batch_size=64", "actor.micro_batch_size=4")
        return parse_config(BASE, "run.yaml", [*fitting, *overrides])

    return build


def said(config: Config, ranks: int = 8, gpus: int = 0, per_node: int = 0) -> str:
    return "\n".join(map(str, checks.check(config, ranks, gpus, per_node)))


def test_the_batch_rules_count_responses_and_data_parallel_replicas(make: Make) -> None:
    config = make()
    assert checks.check(config, 8) == []
    assert checks.data_parallel(8, config.actor.parallel) == 2
    assert checks.responses_per_step(config) // config.trainer.mini_batch_size == 4
    message = said(make("trainer.mini_batch_size=60"))
    assert "60 does not divide" in message and "60 responses per update are not a multiple of actor dp(2)" in message
    assert "micro_batch_size(4) = 8; choose a multiple of 8" in message
    assert said(make("actor.parallel={tp: 4, pp: 1}"), ranks=6) == (
        "actor.parallel: tp(4) x pp(1) does not divide pool size(6); choose degrees whose product is one of "
        "[1, 2, 3, 6], or a multiple of 4 ranks")
    assert "tp(4) x pp(3) does not divide pool size(8)" in said(make("actor.parallel={tp: 4, pp: 3}"))
    assert "512 is more than the step has: prompts_per_step(32) x samples_per_prompt(8) = 256" in said(
        make("trainer.mini_batch_size=512"))
    # 32 prompts are fewer than 64 responses: prompts must not be compared with responses
    assert checks.check(make("trainer.mini_batch_size=256"), 8) == []
    assert checks.check(make("trainer.mini_batch_size=0"), 8) == []
    six = make("trainer.prompts_per_step=3", "generation.samples_per_prompt=2", "trainer.mini_batch_size=0")
    assert "trainer.prompts_per_step: prompts_per_step(3) x samples_per_prompt(2) = 6 responses, all of" in said(six)


@pytest.mark.parametrize("override", [
    "actor.micro_batch_size=0", "generation.samples_per_prompt=0", "trainer.mini_batch_size=-64",
    "trainer.prompts_per_step=1e3", "trainer.prompts_per_step='1e3'", "actor.parallel.tp=true",
])
def test_batch_numbers_that_are_none(make: Make, override: str) -> None:
    with pytest.raises(ConfigError):
        make(override)


def test_heads_layers_and_widths_against_the_degrees(make: Make) -> None:
    four = ("actor.parallel={tp: 4, pp: 1}",)
    assert "num_attention_heads(6) is not a multiple of tp(4); choose tp from [1, 2]" in said(
        make(*four, num_attention_heads=6, num_key_value_heads=2))
    assert "num_key_value_heads(2) is not a multiple of tp(4)" in said(make(*four, num_key_value_heads=2))
    assert "num_key_value_heads(6)" in said(make(*four, num_attention_heads=6, num_key_value_heads=None))
    assert "intermediate_size(66)" in said(make(*four, intermediate_size=66))
    assert "num_hidden_layers(3) is not a multiple of pp(2); choose pp from [1, 3]" in said(make(num_hidden_layers=3))
    assert "1032 is more than the 1024 positions" in said(make("data.max_prompt_tokens=1024"))


def test_the_critic_counts_only_where_it_is_built(make: Make) -> None:
    critic = ("critic.parallel={tp: 3}", "critic.micro_batch_size=5")
    assert checks.check(make(*critic), 8) == []
    message = said(make(*critic, "algorithm.name=ppo"))
    assert "critic.parallel: tp(3) x pp(1) does not divide pool size(8)" in message
    assert "num_attention_heads(8) is not a multiple of tp(3)" in message
    assert "critic dp(8) x micro_batch_size(5) = 40" in said(make("critic.micro_batch_size=5", "algorithm.name=ppo"))
    every = make("algorithm.name=ppo", "algorithm.kl={place: loss}")
    assert checks.active_roles(every) == ("actor", "critic", "reference")


def test_pools(make: Make) -> None:
    two = ("algorithm.name=ppo", "critic.pool=values", "critic.parallel.tp=2")
    assert checks.check(make(*two, "cluster.pools={main: 4, values: 2}"), 6) == []
    assert checks.pool_sizes(make(*two, "cluster.pools={main: 0, values: 2}"), 10) == {"main": 8, "values": 2}
    assert "sums to 6 but the job has 8 ranks" in said(make(*two, "cluster.pools={main: 4, values: 2}"))
    assert "sums to 12 but the job has 8 ranks" in said(make("cluster.pools={main: 12}"))
    assert "leaves no rank of 2 for pool main" in said(make(*two, "cluster.pools={main: 0, values: 2}"), ranks=2)
    assert "only one pool may be 0" in said(make(*two, "cluster.pools={main: 0, values: 0}"))
    assert "no pool is named" in said(make("cluster.pools={}"))
    assert "critic.pool: 'valeus' is none of cluster.pools: main, values; did you mean values?" in said(
        make(*two, "cluster.pools={main: 0, values: 2}", "critic.pool=valeus"))
    assert "cluster.pools.idle: no role of this run (actor)" in said(make("cluster.pools={main: 0, idle: 4}"))
    assert checks.smallest_job(make(*two, "cluster.pools={main: 0, values: 2}")) == 6
    with pytest.raises(ValueError, match=r"tp\(4\) x pp\(3\) does not divide pool size\(8\)"):
        checks.data_parallel(8, ParallelConfig(tp=4, pp=3))


@pytest.mark.parametrize(("overrides", "text"), [
    (["generation.samples_per_prompt=1", "trainer.mini_batch_size=0"], "generation.samples_per_prompt: is 1, but"),
    (["algorithm.kl.coefficient=0.1"], "algorithm.kl.coefficient: 0.1 has no effect with algorithm.kl.place=none"),
    (["algorithm.kl={place: loss, controller: adaptive}"], "algorithm.kl.coefficient: is 0, which the adaptive"),
    (["generation.tp=2"], "generation.tp: is 2, but engine=embedded"),
    (["actor.optimizer.min_lr=1"], "actor.optimizer.min_lr: 1 is above lr(1e-06)"),
    (["trainer.critic_warmup_steps=1"], "has no critic"),
    (["algorithm.name=ppo", "trainer.critic_warmup_steps=2"], "2 of trainer.steps(2) leave no step for the actor"),
    (["reference.offload=[parameters, gradients]"], "reference.offload: holds gradients, but the reference is never"),
    (["trainer.save_hf=save"], "trainer.save_every=0 writes none"),
    (["actor.parallel.sp=true", "actor.parallel.tp=1"], "actor.parallel.sp: splits sequences over the tp ranks, but"),
    (["actor.parallel.vpp=2", "actor.parallel.pp=1"], "actor.parallel.vpp: is 2, but it splits pipeline stages and pp"),
    (["actor.parallel.layers=[1, 1, 2]"], "layers: names 3 stages, but pp(2) x vpp(1) = 2"),
    (["actor.parallel.layers=[3, 2]"], "layers [3, 2] sum to 5, but num_hidden_layers is 4; change a stage"),
    (["actor.parallel={pp: 2, vpp: 3}"], "num_hidden_layers(4) is not a multiple of pp(2) x vpp(3) = 6; choose pp x"),
    (["actor.parallel.cp=3"], "tp(2) x pp(2) x cp(3) does not divide pool size(8)"),
    (["actor.micro_batch_tokens=4096", "trainer.mini_batch_size=1"],
     "are fewer than actor dp(2), so replicas would idle; choose 2 or more, or let more ranks share a copy"),
    (["actor.micro_batch_tokens=100"], "actor.micro_batch_tokens: 100 cannot hold the longest row: max_prompt"),
    (["generation.stop=['']"], "generation.stop: holds an empty text"),
    (["data.shots=[q, a, q]"], "data.shots: has 3 texts; it lists question, answer"),
    (["data.chat=false", "data.system=x"], "data.system: has no effect with data.chat=false"),
    (["data.chat=false", "data.shots=[q, a]"], "data.shots: has no effect with data.chat=false"),
    (["run.device=cuda"], "run.device: is cuda but this node has 0 GPUs"),
    (["cluster.transport=inline"], "start with --single (all degrees 1), or use torchrun"),
    (["data.train=none.jsonl"], "data.train: none.jsonl does not exist (looked in "),
    (["data.train=[train.jsonl, model]"], "data.train: model is neither .jsonl nor .parquet"),
    (["data.train=[]"], "names no file"),
    (["actor.model=org/name"], "actor.model: org/name is not a folder; download"),
    (["actor.model=."], "actor.model: . has no config.json"),
    (["trainer.resume=runs/x/step_000001"], "trainer.resume: runs/x/step_000001 is not a folder"),
    (["trainer.resume=model"], "model has no trainer.json"),
    (["trainer.rollouts.replay=nowhere"], "trainer.rollouts.replay: nowhere is not a folder"),
    (["run.folder=train.jsonl"], "run.folder: train.jsonl is a file"),
    (["reward.function=copi"], "no reward is called 'copi'; did you mean copy?"),
])
def test_single_rules_with_key_numbers_and_remedy(make: Make, overrides: list[str], text: str) -> None:
    found = checks.check(make(*overrides), 8)
    assert any(text in str(violation) for violation in found), found
    assert len(found) == (2 if overrides == ["cluster.transport=inline"] else 1), found


def test_ranks_against_gpus(make: Make) -> None:
    assert "run.device: 8 ranks on this node but 4 GPUs" in said(make(), gpus=4, per_node=8)
    assert said(make("run.device=cpu"), gpus=4, per_node=8) == said(make(), gpus=8, per_node=8) == ""
    assert "at least one" in said(make(), ranks=0)


def test_a_broken_or_different_model(make: Make, tmp_path: Path) -> None:
    config = make("algorithm.name=ppo", "critic.model=other")
    assert "critic.model: other is not a folder" in said(config)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("[")
    assert "config.json that cannot be read" in said(config)
    (tmp_path / "other" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 299}))
    assert "vocabularies differ (actor 300, critic 299)" in said(config)


def test_all_violations_at_once(make: Make) -> None:
    config = make("trainer.mini_batch_size=60", "run.device=cuda", "data.train=none.jsonl", "generation.tp=2")
    keys = {violation.key for violation in checks.check(config, 8)}
    assert keys == {"trainer.mini_batch_size", "run.device", "data.train", "generation.tp"}


def test_single_sets_all_degrees_to_one_and_says_so(make: Make) -> None:
    config = make("algorithm.name=ppo", "cluster.pools={main: 4, values: 4}", "critic.pool=values", "generation.tp=2")
    alone, changes = checks.single(config)
    assert changes == [
        "actor.parallel.tp: 2 -> 1", "actor.parallel.pp: 2 -> 1", "critic.pool: values -> main",
        "cluster.transport: torchrun -> inline", "cluster.pools: {'main': 4, 'values': 4} -> {'main': 0}",
        "generation.tp: 2 -> 1"]
    assert checks.check(alone, 1) == []
    assert checks.single(alone) == (alone, [])
    assert "inline is one process but the job has 2 ranks" in said(alone, ranks=2)
