"""The benchmarks of whole roles at sizes that take seconds: what they print, what they record, what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rollout, train_step
from benchmarks.common import records
from benchmarks.common.job import Timing
from jobs import YAML, fork_job, succeeded

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FAST = ["--rows", "8", "--prompt", "3:9", "--repeats", "1", "--warmup", "0"]


def figures(output: str, results: Path, name: str) -> dict:
    """The last line, which the one record repeats with a date."""
    last = json.loads(output.strip().splitlines()[-1])
    (record,) = [json.loads(line) for line in (results / f"{name}.jsonl").read_text().splitlines()]
    assert len(record.pop("date")) == len("2026-01-01") and record == last
    assert set(last["hardware"]) == {"device", "cpu", "ranks"} and last["versions"]["megatron-core"]
    assert os.uname().nodename not in json.dumps(last) and str(ROOT) not in json.dumps(last)
    return last


def alone(main, words: list[str]) -> str:
    """The output of a benchmark in a process without a launcher; not in this one, which goes on to fork."""
    def body() -> int:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        return main(words) or 0

    result = fork_job(1, body)
    succeeded(result)
    return result.output


@pytest.mark.timeout(120)
def test_train_step_in_one_process(tmp_path):
    out = alone(train_step.main, [*FAST, "--response", "4:8", "--results", str(tmp_path), "run.peak_tflops=0.5"])
    found = figures(out, tmp_path, "train_step")
    phases = found["phases"]
    assert list(phases) == ["old_log_prob", "update_actor", "update_critic", "all"]
    assert sum(phases[name]["share"] for name in list(phases)[:3]) == pytest.approx(1.0, abs=1e-4)
    for phase in phases.values():
        assert phase["tokens_per_s"] == pytest.approx(found["tokens"] / phase["seconds"], rel=1e-3)
        assert phase["mfu"] == pytest.approx(phase["tflops_per_gpu"] / 0.5, rel=1e-3)
        assert phase["memory_peak_mb"] > 50
    assert "MFU" in out and found["rows"] == 8 and 8 * 4 <= found["response_tokens"] <= 8 * 8


@pytest.mark.timeout(120)
def test_rollout_in_one_process(tmp_path):
    out = alone(rollout.main, [*FAST, "--results", str(tmp_path), "generation.max_response_tokens=6"])
    found = figures(out, tmp_path, "rollout")
    assert list(found["phases"]) == ["reshard", "sample", "all"] and found["log_prob_gap"] < 1e-4
    assert found["phases"]["reshard"]["tokens_per_s"] is found["phases"]["all"]["mfu"] is None
    assert 8 <= found["response_tokens"] <= 8 * 6 and found["reshard_bytes"]["moved"] == 0


@pytest.mark.timeout(200)
def test_train_step_of_a_grpo_config_under_torchrun(demo, tmp_path):
    """Two ranks, tensor parallel, no critic; the data file of the config is not there and is not needed."""
    words = [f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "2", "benchmarks/train_step.py", str(YAML),
             f"actor.model={demo}/model", "actor.parallel={tp: 2, pp: 1}", "algorithm.name=grpo",
             "algorithm.kl={place: loss, coefficient: 0.1}", "reference.parallel={tp: 2, pp: 1}",
             "actor.micro_batch_size=4", "data.train=none.jsonl", *FAST, "--response", "4:8", "--results",
             str(tmp_path)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "TORCHELASTIC"))}
    process = subprocess.Popen(words, cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-4000:]
    found = figures(out, tmp_path, "train_step")
    assert list(found["phases"]) == ["old_log_prob", "update_actor", "all"] and found["hardware"]["ranks"] == 2
    assert found["settings"]["roles"]["actor"]["tp"] == 2
    for phase in found["phases"].values():
        assert phase["tokens_per_s_per_gpu"] == pytest.approx(phase["tokens_per_s"] / 2, rel=1e-3)


def test_what_is_refused(capsys, demo, monkeypatch):
    with pytest.raises(SystemExit) as refused:
        train_step.main(["none.yaml"])
    assert refused.value.code == 2 and "none.yaml: cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_step.main(["--prompt", "9:3"])
    assert "neither N nor LOW:HIGH" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="name a CONFIG"):
        rollout.main([])


def test_rates_by_hand():
    timings = {"move": Timing(1.0, 10.0, 2), "work": Timing(3.0, 20.0, 2)}
    found = records.rates(timings, 600, {"work": 12 * 10**12}, ranks=4, peak=10.0)
    assert found["move"] == {"seconds": 1.0, "share": 0.25, "tokens_per_s": None, "tokens_per_s_per_gpu": None,
                             "tflops_per_gpu": None, "mfu": None, "memory_peak_mb": 10.0}
    assert found["work"] == {"seconds": 3.0, "share": 0.75, "tokens_per_s": 200.0, "tokens_per_s_per_gpu": 100.0,
                             "tflops_per_gpu": 2.0, "mfu": 0.2, "memory_peak_mb": 20.0}
    assert found["all"] == {"seconds": 4.0, "share": 1.0, "tokens_per_s": 150.0, "tokens_per_s_per_gpu": 37.5,
                            "tflops_per_gpu": 0.75, "mfu": 0.075, "memory_peak_mb": 20.0}
    assert records.table(found).count("\n") == 3
