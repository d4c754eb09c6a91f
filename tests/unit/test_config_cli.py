"""`rlhf-megatron check`: exit codes, one message, no torch, seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_megatron import __version__, cli
from test_config_load import BASE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(BASE)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_hidden_layers": 2}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_accepts_and_describes(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check", "run.yaml", "--ranks", "4", "actor.micro_batch_size=1", "actor.parallel.tp=2"]) == 0
    out = capsys.readouterr().out
    assert "TP2 PP1 DP2" in out and "4 prompts x 2 = 8 responses, 1 updates of 8" in out and out.endswith("OK\n")
    assert cli.main(["check", "--single", "run.yaml", "actor.parallel.tp=2", "actor.parallel.pp=2"]) == 0
    assert "--single: actor.parallel.tp: 2 -> 1" in capsys.readouterr().out
    assert cli.main(["check", "run.yaml", "actor.parallel.tp=2", "actor.parallel.pp=2"]) == 0  # the fewest ranks: 4
    assert "4 ranks" in capsys.readouterr().out


def test_check_refuses_with_one_message_and_code_2(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check", "run.yaml", "--ranks", "3", "--gpus", "2", "--ranks-per-node", "3", "generation.tp=2",
                     "actor.parallel.tp=2"]) == 2
    caught = capsys.readouterr()
    assert caught.out == "" and caught.err.startswith("run.yaml: refused\n3 problems\n")
    for said in ("tp(2) x pp(1) does not divide pool size(3)", "3 ranks on this node but 2 GPUs", "generation.tp:"):
        assert said in caught.err
    assert cli.main(["check", "none.yaml"]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


def test_words_that_are_no_command(capsys: pytest.CaptureFixture) -> None:
    assert cli.main([]) == cli.main(["chek"]) == 2
    assert cli.main(["--help"]) == cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_train_passes_its_words_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    seen: list[list[str]] = []
    module = ModuleType("rlhf_megatron.train")
    module.main = lambda argv: seen.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlhf_megatron.train", module)
    assert cli.main(["train", "run.yaml", "--single", "a=1"]) == 7 and seen == [["run.yaml", "--single", "a=1"]]


@pytest.mark.parametrize("value", [None, "0,1", "", "-1"])
def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    files = [Path(f"/dev/nvidia{n}") for n in (*range(4), "ctl", "-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: files)
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert cli.visible_gpus() == {None: 4, "0,1": 2, "": 0, "-1": 0}[value]


def test_check_needs_no_torch_and_few_seconds(folder: Path) -> None:
    code = ("import sys; from rlhf_megatron import cli; "
            "code = cli.main(['check', 'run.yaml', 'run.folder=${run.name}']); "
            "heavy = {'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules); "
            "sys.exit(f'imported {heavy}' if heavy else code)")
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 5.0
