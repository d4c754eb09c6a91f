"""The GPU check's parts at tiny sizes on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import gpu_check
from jobs import fork_job, succeeded
from rlhf_megatron import devices
from rlhf_megatron.layouts import ModelSpec

TINY = ModelSpec("llama", num_layers=2, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
                 vocab_size=40, max_positions=64, tied=True)
SIZES = {
    "log_probs": {"positions": 20, "hidden": 16, "vocab": 50, "repeats": 1},
    "permute": {"spec": TINY, "repeats": 1},
    "update": {"spec": TINY, "rows": 4, "prompt": 5, "response": 7, "micro_batch_size": 2, "repeats": 1},
}


@pytest.fixture(autouse=True)
def on_the_cpu():
    devices.choose("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs(dtype):
    found = gpu_check.log_probs(**SIZES["log_probs"], dtype=dtype)
    assert found["ours_s"] > 0 and found["extra_mb"] is None and found["gradients_apart"] < 0.03


def test_permute_copies_qkv_and_gate_up_and_nothing_else():
    found = gpu_check.permute(**SIZES["permute"])
    qkv, gate_up = (4 + 2 * 2) * 8 * 32, 2 * 48 * 32
    assert found["mb"] == 2 * 2 * (qkv + gate_up) / 1e6 and found["gb_per_s"] > 0  # two layers, two bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update(dtype, tmp_path):
    def rank() -> int:
        found = gpu_check.update(**SIZES["update"], dtype=dtype)
        assert not torch.distributed.is_initialized()
        (tmp_path / "found.json").write_text(json.dumps(found))
        return 0

    succeeded(fork_job(1, rank, timeout=60.0))  # gloo's threads in this process would not survive other tests' forks
    found = json.loads((tmp_path / "found.json").read_text())
    # embedding, and per layer: q and o, k and v, gate, up and down, two norms; the final norm
    assert found["parameters"] == 40 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert found["update"]["tokens_per_s"] == pytest.approx(4 * 12 / found["update"]["seconds"])
    assert found["update"]["mfu"] is None


def test_a_part_that_fails_or_takes_too_long_does_not_hide_the_others(monkeypatch):
    def wrong(**sizes):
        raise ValueError("no such kernel")

    monkeypatch.setitem(gpu_check.PARTS, "log_probs", wrong)
    found = gpu_check.run_parts(["log_probs", "permute"], SIZES, 60.0)
    assert found["log_probs"] == {"error": "ValueError: no such kernel"} and found["permute"]["gb_per_s"] > 0
    monkeypatch.setitem(gpu_check.PARTS, "log_probs", lambda **sizes: time.sleep(30))
    started = time.monotonic()
    found = gpu_check.run_parts(["log_probs", "permute"], SIZES, 0.2)
    assert "broken off" in found["log_probs"]["error"] and "no time was left" in found["permute"]["error"]
    assert time.monotonic() - started < 10


def test_without_a_gpu_it_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    assert gpu_check.main(["--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "needs one GPU" in out
    last = json.loads(out.strip().splitlines()[-1])
    assert last["gpu_check"] == gpu_check.NOT_RUN == "not run: no GPU"
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == last
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "updates"])
