"""Fingerprints: independent of how a tensor is cut, additive, and blind to nothing."""

from __future__ import annotations

import pytest
import torch

from model_cases import canonical_weights, empty_like, scatter, spec
from rlhf_megatron.layouts import HFLayout, MegatronLayout, ParallelLayout, make_plan
from rlhf_megatron.reshard import WeightsDiffer, compare, fingerprint, require_equal, verify
from rlhf_megatron.reshard.execute import execute

WRAP = 1 << 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_add_up_to_the_whole(dtype):
    tensor = torch.randn(13, 7).to(dtype)
    whole = fingerprint(tensor, (0, 0), (13, 7)) % WRAP
    for rows, columns in ((5, 3), (1, 6), (12, 1)):
        parts = [(0, 0, tensor[:rows, :columns]), (0, columns, tensor[:rows, columns:]),
                 (rows, 0, tensor[rows:, :columns]), (rows, columns, tensor[rows:, columns:])]
        assert sum(fingerprint(part, (r, c), (13, 7)) for r, c, part in parts) % WRAP == whole


def test_chunks_do_not_matter(monkeypatch):
    tensor = torch.randn(50, 3)
    whole = fingerprint(tensor, (4, 0), (60, 3))
    monkeypatch.setattr(verify, "CHUNK", 10)
    assert fingerprint(tensor, (4, 0), (60, 3)) == whole


def test_swaps_sign_of_zero_and_single_bits_are_seen():
    tensor = torch.arange(6.0).view(2, 3)
    whole = fingerprint(tensor, (0, 0), (2, 3))
    assert fingerprint(tensor.flip(0), (0, 0), (2, 3)) != whole
    assert fingerprint(tensor[:, [1, 0, 2]], (0, 0), (2, 3)) != whole
    negative = tensor.clone()
    negative[0, 0] = -0.0
    assert torch.equal(negative, tensor) and fingerprint(negative, (0, 0), (2, 3)) != whole
    nearby = tensor.clone()
    nearby[1, 2] = torch.nextafter(nearby[1, 2], torch.tensor(9.0))
    assert fingerprint(nearby, (0, 0), (2, 3)) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compare_names_what_differs(dtype):
    model = spec("qwen2")
    layout, copy = MegatronLayout(model, ParallelLayout()), HFLayout(model, 1)
    plan, target = make_plan(layout, copy), empty_like(copy, 0, dtype)
    source = scatter(layout, canonical_weights(model))[0]
    execute(plan, source, target)
    assert compare(plan, source, target) == []
    require_equal(plan, source, target)
    rows = target["model.layers.1.self_attn.k_proj.weight"]
    rows[[0, 1]] = rows[[1, 0]].clone()
    target["model.norm.weight"][3] += 1
    assert compare(plan, source, target) == ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    with pytest.raises(WeightsDiffer, match="2 tensors differ .*k_proj.weight, model.norm.weight"):
        require_equal(plan, source, target)
