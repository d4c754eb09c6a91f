"""Reading configs: strict keys and types, places in errors, overrides, interpolation, and the way back to YAML."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

from rlhf_megatron.config.load import ConfigError, known_keys, load_config, parse_config, to_yaml
from rlhf_megatron.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]

BASE = """\
run:
  name: base
data:
  train: train.jsonl
actor:
  model: model
generation:
  max_response_tokens: 8
  samples_per_prompt: 2
reward:
  function: copy
trainer:
  steps: 2
  prompts_per_step: 4
"""


def parse(text: str = BASE, *overrides: str) -> Config:
    return parse_config(text, "run.yaml", overrides)


def problems(text: str = BASE, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("file", sorted((ROOT / "yaml_configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_config_parses_and_comes_back_equal(file: Path) -> None:
    config = load_config(file)
    assert parse_config(to_yaml(config), "copy") == config


def test_defaults_and_the_number_of_keys() -> None:
    config = parse()
    assert config.actor.optimizer.lr == 1e-6 and config.critic.model is None and config.cluster.pools == {"main": 0}
    assert len(known_keys()) == len(set(known_keys()))
    # what has to be learned: a key of all roles is one key, and so is one of both optimizers
    assert len({re.sub("^(actor|critic|reference)[.]", "", key) for key in known_keys()}) <= 120
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.name = "other"


def test_an_unknown_key_names_line_and_nearest_key() -> None:
    text = BASE.replace("  steps: 2", "  step: 2")
    message = problems(text)
    assert "run.yaml:13: trainer.step: unknown key; did you mean trainer.steps?" in message
    assert "trainer.steps: has to be set" in message
    assert "did you mean actor.optimizer.clip_grad?" in problems(BASE + "  clip_grad: 1.0\n")


def test_a_duplicate_key_names_both_lines() -> None:
    assert "run.yaml:15: trainer.steps: is written twice (first in line 13)" in problems(BASE + "  steps: 3\n")
    assert "run.yaml:15: actor: is written twice (first in line 5)" in problems(BASE + "actor: {model: other}\n")


def test_all_problems_come_in_one_message() -> None:
    message = problems(BASE + "  epochs: 0\n  keep: -1\nfoo: 1\n", "actor.parallel.tp=true", "generation.top_p=1.5")
    for part in ("5 problems", "epochs: 0 has to be at least 1", "keep: -1 has to be at least 0", "foo: unknown key",
                 "actor.parallel.tp: expected a whole number, got true", "top_p: 1.5 has to be at most 1"):
        assert part in message


@pytest.mark.parametrize(("override", "said"), [
    ("trainer.steps=1e3", "expected a whole number, got 1000.0; write 1000"),
    ("trainer.steps='1e3'", "expected a whole number, got the text '1e3'; write it without quotes"),
    ("trainer.steps=2.0", "expected a whole number"),
    ("trainer.steps=true", "got true"),
    ("trainer.steps=010", "got the text '010'"),
    ("trainer.steps=null", "got nothing (null)"),
    ("trainer.steps=[1]", "got a list"),
    ("trainer.seed=-1", "at least 0"),
    ("trainer.resume=true", "expected text, got true; put it in quotes"),
    ("trainer.stop_reward=high", "expected a number or null"),
    ("trainer.stop_reward=false", "got false"),
    ("actor.optimizer.lr='1e-6'", "write it without quotes"),
    ("actor.optimizer.lr=true", "expected a number, got true"),
    ("actor.optimizer.lr=.nan", "expected a number, got the text '.nan'"),
    ("actor.optimizer.lr=1e999", "too large"),
    ("actor.optimizer.beta1=1", "1.0 has to be below 1"),
    ("actor.micro_batch_size=0", "0 has to be at least 1"),
    ("actor.parallel=2", "expected a section with keys tp, pp"),
    ("generation.samples_per_prompt=0", "at least 1"),
    ("generation.temperature=0", "above 0"),
    ("generation.stop=x", "expected a list of texts"),
    ("actor.offload=parameters", "expected a list of texts"),
    ("actor.offload=[optimiser]", "did you mean optimizer?"),
    ("critic.offload=[gradients, optimizer, gradients]", "'gradients' is there twice; name it once"),
    ("generation.stop=[a, 1]", "generation.stop.1: expected text, got 1"),
    ("data.shuffle=yes", "expected true or false, got the text 'yes'; write true or false"),
    ("data.train=3", "expected text or a list of texts"),
    ("data.overlong=dorp", "'dorp' is none of drop, left, right, error; did you mean drop?"),
    ("cluster.pools={a: -1}", "cluster.pools.a: -1 has to be at least 0"),
    ("cluster.pools={a: x}", "cluster.pools.a: expected a whole number"),
    ("cluster.transport=mpi", "is none of torchrun, inline"),
    ("run.name=../x", "has to be letters"),
    ("run.name=a/b", "has to be letters"),
    ("run.name=.hidden", "has to be letters"),
    ("run.name=123", "put it in quotes"),
    ("trainer.seed=99999999999999999999999", "digits"),
])
def test_wrong_values_are_refused_with_the_remedy(override: str, said: str) -> None:
    message = problems(BASE, override)
    assert said in message and message.startswith("1 problem\n") and f"override {override!r}" in message


def test_numbers_are_read_as_written() -> None:
    config = parse(BASE, "actor.optimizer.lr=1e-6", "actor.optimizer.clip_grad=1", "trainer.stop_reward=3")
    assert config.actor.optimizer.lr == 1e-6 and isinstance(config.actor.optimizer.clip_grad, float)
    assert config.trainer.stop_reward == 3.0 and isinstance(config.trainer.stop_reward, float)
    assert parse(BASE.replace("steps: 2", "steps: +2")).trainer.steps == 2


def test_overrides() -> None:
    config = parse(BASE, "trainer.steps=5", "trainer.steps=6", "actor.parallel={tp: 2}", "actor={parallel: {pp: 3}}",
                   "cluster.pools={a: 2, main: 0}", "reward.arguments.deep.er=1", "data.train=[a.jsonl, b.jsonl]",
                   "data.system=", 'generation.stop=["\\n", "=x"]')
    assert config.trainer.steps == 6 and (config.actor.parallel.tp, config.actor.parallel.pp) == (2, 3)
    assert config.cluster.pools == {"a": 2, "main": 0} and config.reward.arguments == {"deep": {"er": 1}}
    assert config.data.train == ("a.jsonl", "b.jsonl") and config.data.system is None
    assert config.generation.stop == ("\n", "=x")


@pytest.mark.parametrize(("override", "said"), [
    ("trainer.stepz=1", "did you mean trainer.steps?"),
    ("lr=1", "did you mean actor.optimizer.lr?"),
    ("trainer.steps.x=1", "trainer.steps is a value and has no keys"),
    ("trainer.steps", "reads key=value"),
    ("=1", "reads key=value"),
    ("trainer..steps=1", "reads key=value"),
    ("data.system=#### 1", "'#' begins a comment"),
    ("data.system=a #b", "'#' begins a comment"),
    ("data.system=[a", "not valid YAML"),
])
def test_overrides_that_are_refused(override: str, said: str) -> None:
    assert said in problems(BASE, override)


@pytest.mark.parametrize(("text", "said"), [
    ("", "a config is a mapping of sections"),
    ("- a", "a config is a mapping of sections"),
    ("run: [1", "run.yaml:1: this is not valid YAML"),
    ("a: 1\n---\nb: 2\n", "run.yaml:2: this is not valid YAML"),
    ("1: 2", "run.yaml:1: a key has to be text: quote '1'"),
    ("? [a]\n: 1", "a key has to be text, not a list"),
    ("run: &r {name: x}\nb: {<<: *r}", "run.yaml:2: merge keys"),
    ("a: \0", "not valid YAML"),
])
def test_texts_that_are_no_config(text: str, said: str) -> None:
    assert said in problems(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    for name, said in (("none.yaml", "No such file"), ("", "Is a directory"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / name)


def test_an_empty_section_keeps_its_defaults_and_aliases_work() -> None:
    config = parse(BASE.replace("  model: model", "  model: model\n  parallel: &p {tp: 2, pp: 2}")
                   + "critic:\nreference:\n  parallel: *p\n")
    assert config.critic.micro_batch_size == 4 and config.reference.parallel == config.actor.parallel


def test_interpolation() -> None:
    config = parse(BASE + "critic:\n  parallel: ${actor.parallel}\n  model: ${actor.model}-${trainer.seed}\n",
                   "actor.parallel.tp=2", "trainer.seed=7", "reward.arguments={n: '${trainer.seed}', raw: '\\${x}'}")
    assert config.critic.parallel.tp == 2 and config.critic.model == "model-7"
    assert config.reward.arguments == {"n": 7, "raw": "${x}"}


@pytest.mark.parametrize(("value", "said"), [
    ("${run.nam}", "refers to run.nam, which is not set; did you mean run.name?"),
    ("${data.system}", "refers to itself"),
    ("${data}", "refers to itself"),
    ("${run.folder", "is no reference like"),
    ("${oc.env:HOME}", "resolvers and environment variables are not read"),
])
def test_references_that_are_refused(value: str, said: str) -> None:
    message = problems(BASE, f"data.system='{value}'")
    assert said in message and "override" in message


def test_what_to_yaml_writes_is_read_back_equal() -> None:
    """Texts that look like numbers, dates, references, tags; every kind of line break; random ones of such parts."""
    base, rng = parse(), random.Random(1)
    odd = ["1e3", "1", "01", "yes", "null", "~", "", "true", "2024-01-01", "<<", "=", "0x1", "1:30", ".5", "-.5e3",
           "???", "${a}", "\\${a}", "\\\\${a}", "${", "- a", "a: b", "#x", " a ", "\ufeff", "a\nb\n", "\x85", "\u2028",
           "é😀\x07"]
    parts = "\\${}a.:#'\"\n\t \r\x85é-!&*[]1e+~%@`|>?,"
    odd += ["".join(rng.choice(parts) for _ in range(rng.randint(1, 12))) for _ in range(150)]
    arguments = {text: [text, {"x": number}] for text, number in zip(odd, [1, 1.5, 1e-30, -1e22, None, True] * 50,
                                                                     strict=False)}
    config = dataclasses.replace(base, generation=dataclasses.replace(base.generation, stop=tuple(odd)),
                                 reward=dataclasses.replace(base.reward, arguments=arguments))
    assert parse(to_yaml(config)) == config
