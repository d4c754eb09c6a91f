"""A tiny llama for tests: its spec, canonical random weights, and how they are laid into and read out of an engine."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import torch

from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ModelSpec

VOCAB = 37  # odd: no tp above 1 divides it


def tiny_spec(**changes) -> ModelSpec:
    sizes = dict(family="llama", num_layers=4, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=2,
                 head_dim=8, vocab_size=VOCAB, max_positions=128, norm_eps=1e-6, rope_theta=10000.0)
    return ModelSpec(**{**sizes, **changes})


def settings(**changes) -> SimpleNamespace:
    """Optimizer settings with the defaults of the config."""
    values = dict(name="adam", lr=1e-2, min_lr=0.0, schedule="constant", warmup_steps=0, weight_decay=0.0, beta1=0.9,
                  beta2=0.95, eps=1e-8, clip_grad=1.0)
    return SimpleNamespace(**{**values, **changes})


def canonical(layout: MegatronLayout, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by canonical name, the same whatever the layout."""
    weights = {}
    for name, shape in layout.canonical_shapes().items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{seed}".encode()))
        noise = torch.randn(shape, generator=generator)
        # sizes that keep hidden states near 1, so that no layer enlarges the rounding of the ones before it
        size = 0.5 if name.endswith("embed_tokens.weight") else 0.2
        weights[name] = 1.0 + 0.03 * noise if name.endswith("norm.weight") else size * noise
    return weights


def lay_in(layout: MegatronLayout, rank: int, weights: dict[str, torch.Tensor],
           tensors: dict[str, torch.Tensor]) -> None:
    """Write this rank's slices of canonical weights into local tensors."""
    for place in layout.placements(rank):
        size = tuple(b - a for a, b in zip(place.box.start, place.box.stop, strict=True))
        there = tuple(slice(o, o + n) for o, n in zip(place.offset, size, strict=True))
        here = tuple(slice(a, b) for a, b in zip(place.box.start, place.box.stop, strict=True))
        tensors[place.local][there] = weights[place.box.tensor][here].to(tensors[place.local].dtype)


def read_out(layout: MegatronLayout, rank: int, tensors: dict[str, torch.Tensor]) -> list[tuple]:
    """[(canonical name, start, stop, values)] of what this rank holds."""
    pieces = []
    for place in layout.placements(rank):
        size = tuple(b - a for a, b in zip(place.box.start, place.box.stop, strict=True))
        there = tuple(slice(o, o + n) for o, n in zip(place.offset, size, strict=True))
        values = tensors[place.local][there].detach().float().clone()
        pieces.append((place.box.tensor, place.box.start, place.box.stop, values))
    return pieces


def join(layout: MegatronLayout, ranks: list[list[tuple]], tolerance: float = 0.0) -> dict[str, torch.Tensor]:
    """Pieces of all ranks -> canonical tensors. Every element must be there, and copies on several ranks must agree."""
    whole = {name: torch.full(shape, torch.nan) for name, shape in layout.canonical_shapes().items()}
    for pieces in ranks:
        for name, start, stop, values in pieces:
            view = whole[name][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            known = ~view.isnan()
            torch.testing.assert_close(view[known], values[known], atol=tolerance, rtol=0,
                                       msg=lambda m, n=name: f"{n}: {m}")
            view.copy_(values)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is not held completely"
    return whole


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
