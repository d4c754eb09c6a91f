"""SmolLM2-135M-Instruct, a real model: GSM8K in both layouts, and the whole runs of `make smollm` and `make demo`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jobs import run_job

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT / "yaml_configs" / "smollm2_135m_gsm8k_grpo_cpu.yaml"
LAYOUTS = {"pp2dp2": (4, []), "tp3": (3, ["actor.parallel.tp=3", "actor.parallel.pp=1"])}


def run(yaml: Path, ranks: int, runs: Path, *overrides: str, timeout: float) -> tuple[list[dict], str]:
    """(the lines of metrics.jsonl, the console) of a run that must succeed with finite metrics only."""
    result = run_job([str(yaml), f"run.folder={runs}", "run.name=run", *overrides], ranks, timeout)
    assert result.codes == [0] * ranks and not result.timed_out, result.output[-4000:]
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
    return lines, result.output


def gsm8k(smollm2: Path, runs: Path, layout: str, *overrides: str, timeout: float) -> list[dict]:
    ranks, degrees = LAYOUTS[layout]
    lines, output = run(GSM8K, ranks, runs, f"actor.model={smollm2}", f"data.train={ROOT}/tests/data/gsm8k/train.jsonl",
                        "trainer.save_hf=never", *degrees, *overrides, timeout=timeout)
    for line in lines:
        assert 0 <= line["reward/format"] <= 1 and 0 <= line["reward/correct"] <= 1
        assert line["rollout/log_prob_gap"] < 0.1 and line["actor/skipped"] == 0
    assert "warning" not in output, output
    return lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_short_gsm8k_step(smollm2, tmp_path, layout):
    (line,) = gsm8k(smollm2, tmp_path, layout, "trainer.steps=1", "trainer.prompts_per_step=2",
                    "generation.samples_per_prompt=2", "generation.max_response_tokens=12",
                    "actor.micro_batch_size=1", timeout=280)
    assert line["response/length_mean"] > 6


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_gsm8k_steps(smollm2, tmp_path, layout, record_property):
    lines = gsm8k(smollm2, tmp_path, layout, "trainer.steps=3", timeout=1700)
    assert len(lines) == 3
    record_property("format", [round(line["reward/format"], 3) for line in lines])
    record_property("seconds_per_step", [round(line["timing/step"], 1) for line in lines])


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_sums_are_learned(smollm2, tmp_path, record_property):
    """What `make smollm` runs: 12 steps of GRPO at PP2 x DP2, bf16 with fp32 master weights."""
    from examples.evaluate_sums import accuracy
    from examples.make_sums_data import write

    write(tmp_path / "sums")
    lines, _ = run(ROOT / "yaml_configs" / "smollm2_135m_sums_grpo_cpu.yaml", 4, tmp_path, f"actor.model={smollm2}",
                   f"data.train={tmp_path}/sums/train.jsonl", timeout=2400)
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == 12 and max(rewards[-2:]) - rewards[0] >= 0.3, rewards
    before, after = (accuracy(str(folder))[0] for folder in (smollm2, tmp_path / "run" / "hf" / "final"))
    assert after >= 0.75 * 64, (before, after)
    record_property("rewards", [round(reward, 3) for reward in rewards])
    record_property("correct_of_64", [before, after])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tp", [2, 1], ids=["tp2pp2", "dp2pp2"])
def test_the_demo_learns_in_both_layouts(tmp_path, tp, record_property):
    from examples.make_demo_model import make

    make(tmp_path / "demo")
    lines, _ = run(ROOT / "yaml_configs" / "demo_ppo_cpu.yaml", 4, tmp_path, f"actor.model={tmp_path}/demo/model",
                   f"data.train={tmp_path}/demo/class_train.jsonl",
                   *(f"{role}.parallel.tp={tp}" for role in ("actor", "critic", "reference")), timeout=1100)
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[0] < 0.2 and rewards[-1] > 0.9, rewards
    record_property("rewards", [round(reward, 3) for reward in rewards])
