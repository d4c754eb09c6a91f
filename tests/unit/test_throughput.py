"""FLOPs of a step and the rates made of them, against figures worked out by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from rlhf_megatron import devices
from rlhf_megatron.config.load import parse_config
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.trainer import throughput
from rlhf_megatron.trainer.run import tokens_of
from rlhf_megatron.trainer.throughput import Tokens
from test_config_load import BASE

# two layers, hidden 8, FFN 20, four heads of size 3 (not 8 / 4) over two KV heads, vocabulary 50, gated
MODEL = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "vocab_size": 50,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
PROMPTS, RESPONSES = [2, 3], [3, 1]  # L = 5 and 4: 9 tokens, 25 + 16 = 41 squared, 4 scored
# per token, both layers: q and o 2 x 8 x 12, k and v 2 x 8 x 6, gate, up and down 3 x 8 x 20; a multiply-add is two
PER_TOKEN = 2 * 2 * (2 * 96 + 2 * 48 + 480)
FORWARD = 9 * PER_TOKEN + 41 * 48 + 4 * 2 * 8 * 50  # attention 48 per L^2: half of 2 layers x 2 products x 2 x 12
VALUES = 9 * PER_TOKEN + 41 * 48 + 4 * 2 * 8  # a head of one row instead of 50


@pytest.fixture
def models(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    config = parse_config(BASE, "run.yaml", [f"actor.model={tmp_path}/model", "algorithm.name=ppo",
                                             "algorithm.kl={place: loss}"])
    return throughput.read_models(config)


def test_tokens_are_counted_without_padding():
    counted = Tokens.of(PROMPTS, RESPONSES)
    assert counted == Tokens(total=9, squared=41, scored=4)
    assert counted + Tokens.of([1], [1]) == Tokens(11, 45, 5)
    batch = DataProto(tensors={
        "prompts": Ragged(torch.zeros(5, dtype=torch.int64), torch.tensor(PROMPTS)),
        "responses": Ragged(torch.zeros(4, dtype=torch.int64), torch.tensor(RESPONSES)),
        "response_mask": Ragged(torch.tensor([True, False, True, True]), torch.tensor(RESPONSES)),
    })
    assert tokens_of(batch) == counted
    assert tokens_of(batch, valid_only=True) == Tokens(9, 41, 3)


def test_every_phase_of_a_ppo_step(models):
    assert set(models) == {"actor", "critic", "reference"} and PER_TOKEN == 3072
    assert (FORWARD, VALUES) == (32816, 29680)
    once = Tokens.of(PROMPTS, RESPONSES)
    worked = dict.fromkeys(("generate", "old_log_prob", "reference", "values"), once)
    worked |= {"update_critic": once + once, "update_actor": once + once}  # two epochs
    found = throughput.phase_flops(models, worked)
    assert found == {"generate": FORWARD, "old_log_prob": FORWARD, "reference": FORWARD, "values": VALUES,
                     "update_critic": 6 * VALUES, "update_actor": 6 * FORWARD}
    # no critic and no reference: their phases count nothing; a replayed rollout is not generated
    found = throughput.phase_flops({"actor": models["actor"]}, {n: c for n, c in worked.items() if n != "generate"})
    assert found == {"old_log_prob": FORWARD, "update_actor": 6 * FORWARD}
    with pytest.raises(ValueError, match="'reward' computes with no model"):
        throughput.phase_flops(models, {"reward": once})


def test_rates_are_per_rank_and_mfu_is_a_fraction_of_the_peak():
    found = throughput.rates(flops=8 * 10**15, tokens=4000, seconds=2.0, ranks=8, peak_tflops=1000.0)
    assert found == {"perf/tokens_per_second": 2000.0, "perf/tokens_per_second_per_gpu": 250.0,
                     "perf/tflops_per_gpu": 500.0, "perf/mfu": 0.5}
    assert "perf/mfu" not in throughput.rates(10**12, 1, 1.0, 1, None)


@pytest.mark.parametrize(("product", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.4),
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0), ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0),
    ("NVIDIA GH200 480GB", 989.4), ("NVIDIA H20", 148.0), ("NVIDIA RTX A1000", None), ("Tesla T4", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
])
def test_peaks_of_known_gpus(product, tflops):
    assert devices.known_peak(product) == tflops


def test_the_peak_is_for_bf16_on_a_gpu(monkeypatch):
    assert devices.peak_tflops("bfloat16") is None and devices.product_name() == "cpu"
    monkeypatch.setattr(devices, "is_cuda", lambda: True)
    monkeypatch.setattr(devices, "device", lambda: None)
    monkeypatch.setattr(devices.torch, "cuda", SimpleNamespace(get_device_name=lambda device: "NVIDIA H200"))
    assert devices.peak_tflops("bfloat16") == 989.4 and devices.peak_tflops("float32") is None
