"""Floating-point operations of a model, from its shape: what throughput, MFU and load balancing count with.

One multiply-add is two operations. Counted are the matrix products: projections, gated or plain MLP, attention over the
causal half, LM head or value head. Norms, activations, rotary embeddings and the embedding lookup are not, and neither
is what recomputation repeats, so these are model FLOPs as in Chowdhery et al. 2022 (PaLM), appendix B,
https://arxiv.org/abs/2204.02311. The per-layer terms are those of Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, appendix, with grouped queries, a head size of its own, a gated MLP, and half of the
attention matrix because it is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ModelSpec

TRAINING = 3  # forward, and a backward with two products for each of forward's


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward, as coefficients.

    per_token: for every token that enters the layers.
    per_token_squared: for every sequence, times its length squared: attention.
    per_scored_token: for every position whose head output is wanted.
    """

    per_token: int
    per_token_squared: int
    per_scored_token: int

    def total(self, tokens: int, tokens_squared: int, scored: int) -> int:
        """`tokens`: sum of the sequence lengths L; `tokens_squared`: sum of L^2; `scored`: sum of scored positions."""
        return self.per_token * tokens + self.per_token_squared * tokens_squared + self.per_scored_token * scored


def forward_flops(spec: ModelSpec, head: str = "lm") -> ForwardFlops:
    """The coefficients of a model; head "lm" multiplies with the vocabulary, "value" with one row."""
    hidden, query = spec.hidden_size, spec.num_heads * spec.head_dim
    key_value = 2 * spec.num_kv_heads * spec.head_dim
    projections = hidden * (query + key_value) + query * hidden
    mlp = (3 if spec.gated else 2) * hidden * spec.ffn_hidden_size
    return ForwardFlops(
        per_token=2 * spec.num_layers * (projections + mlp),
        # scores and their product with the values, 2 x 2 x query x L^2, of which causality leaves half
        per_token_squared=2 * spec.num_layers * query,
        per_scored_token=2 * hidden * (spec.vocab_size if head == "lm" else 1),
    )
