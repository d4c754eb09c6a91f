"""Small model specs and weights for layout tests: every element of every canonical tensor is different."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf_megatron.layouts import ModelSpec, family_for, family_of

BASE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 22, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0}


def config(family: str = "llama", **changes: object) -> dict:
    return {"model_type": family, "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
                                                    + "ForCausalLM"],
            **BASE, **({"head_dim": 8} if family == "qwen3" else {}), **changes}


def spec(family: str = "llama", **changes: object) -> ModelSpec:
    hf_config = config(family, **changes)
    return family_for(hf_config).spec(hf_config)


def canonical_weights(model: ModelSpec, head: str = "lm", seed: int = 0, dtype: torch.dtype = torch.float32
                      ) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = family_of(model.family).canonical_shapes(model, head)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def empty_like(layout, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A rank's local tensors full of NaN, so that an element nobody wrote is seen."""
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in layout.local_shapes(rank).items()}


def scatter(layout, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
            ) -> dict[int, dict[str, torch.Tensor]]:
    """Local tensors of every rank of a layout; padding is zero."""
    found = {}
    for rank in layout.ranks:
        local = {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.local_shapes(rank).items()}
        for box, name, offset, _ in layout.placements(rank):
            into = local[name][tuple(slice(o, o + s) for o, s in zip(offset, box.size, strict=True))]
            into.copy_(weights[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])
        found[rank] = local
    return found


def write_hf(directory: Path, hf_config: dict, weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config))
    names = list(weights)
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: weights[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


