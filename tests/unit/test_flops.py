"""Counted operations against figures worked out by hand."""

from rlhf_megatron.layouts.flops import TRAINING, forward_flops
from rlhf_megatron.layouts.spec import ModelSpec


def spec(**changes):
    shape = dict(family="llama", num_layers=2, hidden_size=8, ffn_hidden_size=20, num_heads=4, num_kv_heads=2,
                 head_dim=3, vocab_size=50, max_positions=64)
    return ModelSpec(**{**shape, **changes})


def test_every_product_is_counted():
    counted = forward_flops(spec())
    # per layer and token: q 8x12, k and v 8x6 each, out 12x8, gate, up and down 8x20 each, times 2
    assert counted.per_token == 2 * 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 20) == 3072
    assert counted.per_token_squared == 2 * (2 * 2 * 12) // 2 == 48
    assert counted.per_scored_token == 2 * 8 * 50
    assert forward_flops(spec(), "value").per_scored_token == 16
    assert counted.total(tokens=7, tokens_squared=3**2 + 4**2, scored=2) == 7 * 3072 + 25 * 48 + 2 * 800


def test_a_plain_mlp_has_two_matrices():
    assert forward_flops(spec(gated=False)).per_token == 3072 - 2 * 2 * 8 * 20


def test_llama_3_8b_is_about_two_operations_a_parameter():
    llama = spec(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
                 vocab_size=128256)
    counted = forward_flops(llama)
    assert counted.per_token + counted.per_scored_token == 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024
                                                                    + 3 * 4096 * 14336) + 4096 * 128256)
    # 6 x parameters x tokens, without the embedding lookup: 7.50e9 parameters
    assert TRAINING * (counted.per_token + counted.per_scored_token) / 6e9 == 7.504658432
