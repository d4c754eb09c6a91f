"""A config may come from anywhere: it never builds objects, calls, reads the environment or grows without bound."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from rlhf_megatron.config import checks
from rlhf_megatron.config.load import ConfigError, load_config, parse_config
from test_config_load import BASE


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    """The error of a config file that must be refused within a second and without having run anything."""
    file, marker = tmp_path / "run.yaml", tmp_path / "marker"
    file.write_text(text.replace("MARKER", str(marker)))
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override.replace("MARKER", str(marker)) for override in overrides])
    assert time.process_time() - started < 1.0
    assert not marker.exists()
    return str(caught.value).replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize("value", [
    "!!python/object/apply:os.system ['touch MARKER']",
    "[1, !!python/object/apply:os.system ['touch MARKER']]",
    "!!python/object/new:os.system ['touch MARKER']",
    "{a: !!python/name:os.system }",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch MARKER']",
    "!mine x",
    "!!str x",
])
def test_tags_are_refused_in_files_and_overrides(tmp_path: Path, value: str) -> None:
    message = refused(tmp_path, BASE + f"  resume: {value}\n")
    assert "run.yaml:15: the tag !" in message
    assert "override" in refused(tmp_path, BASE, f"trainer.resume={value}")


def test_a_tag_behind_a_tag_directive_or_as_a_key(tmp_path: Path) -> None:
    text = "%TAG !p! tag:yaml.org,2002:python/object/apply:\n---\nrun: !p!os.system ['touch MARKER']\n"
    assert "run.yaml:3: the tag !!python/object/apply:os.system" in refused(tmp_path, text)
    assert "run.yaml:1: the tag" in refused(tmp_path, "? !!python/object/apply:os.system ['touch MARKER']\n: 1\n")


@pytest.mark.parametrize("value", ["{_target_: os.system}", "[1, {a: [{_target_: os.system, command: touch MARKER}]}]"])
def test_targets_are_refused_anywhere(tmp_path: Path, value: str) -> None:
    text = BASE.replace("  function: copy", f"  function: copy\n  arguments: {{x: {value}}}")
    message = refused(tmp_path, text)
    assert "run.yaml:12: reward.arguments.x" in message and "_target_: names something to call" in message
    assert "names something to call" in refused(tmp_path, BASE, f"reward.arguments.x={value}")
    assert "names something to call" in refused(tmp_path, BASE, "reward.arguments._target_=os.system")
    assert "names something to call" in refused(tmp_path, BASE + "_target_: os.system\n")


@pytest.mark.parametrize("variable", ["!!python/object/apply:os.system ['touch MARKER']", "{_target_: os.system}", "x"])
def test_the_environment_is_not_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("RLHF_PROBE", variable.replace("MARKER", str(tmp_path / "marker")))
    for reference in ("${oc.env:RLHF_PROBE}", "${oc.decode:${oc.env:RLHF_PROBE}}", "${oc.create:${oc.env:RLHF_PROBE}}"):
        message = refused(tmp_path, BASE + f"  resume: {reference}\n")
        assert "run.yaml:15: trainer.resume" in message and variable not in message
        assert "override" in refused(tmp_path, BASE, f"trainer.resume={reference}")
    os.environ.pop("RLHF_PROBE")


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 11))
REFERENCES = BASE.replace("  function: copy\n", "  function: copy\n  arguments:\n    x0: aaaaaaaaaa\n" + "".join(
    f"    x{i}: '{f'${{reward.arguments.x{i - 1}}}' * 10}'\n" for i in range(1, 11)))
BOMBS = {
    "aliases": (ALIASES, "run.yaml:1: more than 10000 values once its aliases are followed"),
    "references": (REFERENCES, "expand to more than"),
    "loop": ("run: &a {x: *a}\n", "aliases followed"),
    "depth": ("[" * 100_000, "nested deeper"),
    "size": ("a: " + "x" * (1 << 21), "characters are more"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_bounded(tmp_path: Path, name: str) -> None:
    text, said = BOMBS[name]
    assert said in refused(tmp_path, text)  # within a second
    tracemalloc.start()
    with pytest.raises(ConfigError):
        parse_config(text, "run.yaml")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("function", [
    "os:system", "subprocess:run", "builtins:eval", "/tmp/x.py:f", "../x:f", "x.py", "a:b:c", "yaml:load",
    "torch.hub:load", "no_such_module_anywhere:f", "rlhf_megatron.devices:choose", "a..b:f", "copi",
])
def test_reward_code_is_confined_to_the_users_modules(function: str) -> None:
    config = parse_config(BASE, "run.yaml", [f"reward.function='{function}'"])
    assert ["reward.function"] == [v.key for v in checks.check(config, 1) if v.key.startswith("reward")]


def test_a_users_module_is_found_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/maths.py", "alone.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    for function, good in (("mine.maths:score", True), ("alone:score", True), ("mine:score", True),
                           ("mine.other:score", False), ("alone.x:score", False)):
        config = parse_config(BASE, "run.yaml", [f"reward.function={function}"])
        assert good is not any(v.key == "reward.function" for v in checks.check(config, 1)), function
    assert not (tmp_path / "marker").exists()
