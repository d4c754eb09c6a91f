"""ModelSpec, ParallelLayout, the families and what each Megatron rank holds."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from model_cases import canonical_weights, config, scatter, spec
from rlhf_megatron.layouts import (
    FAMILIES,
    HFLayout,
    MegatronLayout,
    ParallelLayout,
    family_for,
    family_of,
    padded_vocab,
)

COMBINATIONS = [dict(), dict(tp=2, dp=2), dict(pp=4), dict(tp=2, pp=2), dict(tp=4, pp=2), dict(tp=2),
                dict(pp=2, vpp=2), dict(tp=2, pp=2, layers=(3, 1)), dict(pp=3, cp=2, layers=(1, 2, 1))]


def test_coordinates_and_rank_of_are_inverse():
    layout = ParallelLayout.build(range(10, 26), tp=2, pp=2, cp=2)
    assert (layout.dp, layout.size) == (2, 16)
    assert layout.coordinates(10) == (0, 0, 0, 0)
    assert layout.coordinates(11).tp == 1          # tp fastest
    assert layout.coordinates(12).cp == 1
    assert layout.coordinates(14).dp == 1
    assert layout.coordinates(18).pp == 1          # pp slowest
    for rank in layout.ranks:
        assert layout.rank_of(**layout.coordinates(rank)._asdict()) == rank


def test_groups_cover_every_rank_once_and_vary_only_their_axes():
    layout = ParallelLayout.build(8, tp=2, pp=2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert layout.groups("tp", "cp", "dp", "pp") == [tuple(range(8))]


def test_layout_errors_say_the_equation_and_the_remedy():
    with pytest.raises(ValueError, match=r"tp\(4\) x pp\(3\) x cp\(1\) = 12 does not divide the number of ranks\(8\)"):
        ParallelLayout.build(8, tp=4, pp=3)
    with pytest.raises(ValueError, match="= 4 but 2 ranks are given"):
        ParallelLayout(tp=4, ranks=(0, 1))
    with pytest.raises(ValueError, match="tp=0"):
        ParallelLayout(tp=0)
    with pytest.raises(ValueError, match="twice"):
        ParallelLayout(tp=2, ranks=(3, 3))
    with pytest.raises(ValueError, match="rank 9 is not among"):
        ParallelLayout(tp=2).coordinates(9)
    problems = ParallelLayout(tp=3, pp=3).validate(spec())
    assert any("num_kv_heads(4) is not a multiple of tp(3)" in text and "[1, 2, 4]" in text for text in problems)
    assert any("num_layers(4) is not a multiple of pp(3)" in text for text in problems)
    assert ParallelLayout(tp=4, pp=2).validate(spec()) == []
    with pytest.raises(ValueError, match=r"num_kv_heads\(4\) is not a multiple of tp\(8\)"):
        MegatronLayout(spec(), ParallelLayout(tp=8))


def test_virtual_and_uneven_stages():
    virtual = ParallelLayout(pp=2, vpp=2)
    assert [[list(virtual.stage_layers(8, stage, chunk)) for chunk in (0, 1)] for stage in (0, 1)] == [
        [[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = ParallelLayout(pp=2, vpp=2, layers=(1, 3, 2, 1))  # by depth: stage 0, stage 1, stage 0, stage 1
    assert [[list(uneven.stage_layers(7, stage, chunk)) for chunk in (0, 1)] for stage in (0, 1)] == [
        [[0], [4, 5]], [[1, 2, 3], [6]]]
    held = MegatronLayout(spec(), ParallelLayout(pp=2, vpp=2)).local_shapes(1)
    assert "model1.output_layer.weight" in held and "model0.decoder.layers.0.mlp.linear_fc1.weight" in held
    assert not any("embedding" in name or name.startswith("decoder") for name in held)


@pytest.mark.parametrize(("degrees", "said"), [
    (dict(pp=2, layers=(3, 2)), r"layers \[3, 2\] sum to 5, but the model has num_layers\(4\)"),
    (dict(pp=2, vpp=3), r"num_layers\(4\) is not a multiple of pp\(2\) x vpp\(3\) = 6; legal pp x vpp .* \[1, 2, 4\]"),
    (dict(pp=2, vpp=2, layers=(2, 2)), r"names 2 stages, but pp\(2\) x vpp\(2\) = 4"),
    (dict(pp=2, layers=(4, 0)), "every stage needs at least one layer"),
    (dict(vpp=2), r"vpp\(2\) splits pipeline stages, but pp is 1"),
    (dict(pp=2, vpp=0), "vpp=0: a parallel degree must be an integer of at least 1"),
])
def test_stages_that_do_not_add_up_are_refused_with_both_numbers(degrees, said):
    with pytest.raises(ValueError, match=said):
        MegatronLayout(spec(), ParallelLayout(**degrees))


def test_stage_layers_and_padded_vocab():
    layout = ParallelLayout(pp=4)
    assert [list(layout.stage_layers(8, stage)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [padded_vocab(11, tp) for tp in (1, 2, 4)] == [11, 12, 12]
    assert padded_vocab(12, 4) == 12


def test_both_spellings_of_rope_mean_the_same():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    new_config = config(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **llama3})
    del new_config["rope_theta"]
    new = FAMILIES["llama"].spec(new_config)
    assert old == new and new.rope_theta == 5e5 and new.rope_scaling == {"rope_type": "llama3", **llama3}
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert spec(rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize("family, changes, said", [
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    ("llama", {"num_key_value_heads": 3}, "is not a multiple of num_kv_heads"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
])
def test_config_that_cannot_be_expressed_is_refused(family, changes, said):
    with pytest.raises(ValueError, match="(?s)" + said.replace("(", r"\(")):
        spec(family, **changes)


def test_unknown_family_and_missing_keys_are_named():
    with pytest.raises(ValueError, match="'gpt9' is not a known model family; known: llama, qwen2, qwen3"):
        family_for({"model_type": "gpt9"})
    incomplete = config()
    del incomplete["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size is missing"):
        family_for(incomplete).spec(incomplete)


def test_hf_config_round_trip_keeps_foreign_keys():
    source = config("qwen3", some_extra_key={"kept": 1}, bos_token_id=5)
    model = family_for(source).spec(source)
    written = family_of("qwen3").hf_config(model)
    assert written == source
    assert family_for(written).spec(written) == model
    value = family_of("qwen3").hf_config(model, head="value")
    assert value["architectures"] == ["Qwen3ForTokenClassification"] and len(value["id2label"]) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_layout_is_sound_and_holds_every_canonical_element(family, tied, head):
    model = spec(family, tie_word_embeddings=tied)
    sizes = HFLayout(model, 1, head).canonical_shapes()
    for degrees in COMBINATIONS:
        for norm_names in ("local", "te"):
            layout = MegatronLayout(model, ParallelLayout(**degrees), head, norm_names)
            seen = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in sizes.items()}
            for rank in layout.parallel.groups("tp", "pp")[0]:
                assert layout.check(rank) == []
                for box in {place.box for place in layout.placements(rank)}:
                    seen[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
            assert all(int(count.min()) >= 1 for count in seen.values())


def test_megatron_rows_against_a_conversion_written_by_hand():
    model = spec("qwen2")
    weights = canonical_weights(model)
    layout = MegatronLayout(model, ParallelLayout(tp=2, pp=2))
    local = scatter(layout, weights)
    prefix, q_per_group, dim = "model.layers.3.", 2, model.head_dim  # layer 3 = second layer of stage 1
    for tp in range(2):
        held = local[layout.parallel.rank_of(tp=tp, pp=1)]
        rows, bias = [], []
        for group in (2 * tp, 2 * tp + 1):
            for name, heads in (("q", q_per_group), ("k", 1), ("v", 1)):
                lines = slice(group * heads * dim, (group + 1) * heads * dim)
                rows.append(weights[f"{prefix}self_attn.{name}_proj.weight"][lines])
                bias.append(weights[f"{prefix}self_attn.{name}_proj.bias"][lines])
        at = "decoder.layers.1."
        assert torch.equal(held[at + "self_attention.linear_qkv.weight"], torch.cat(rows))
        assert torch.equal(held[at + "self_attention.linear_qkv.bias"], torch.cat(bias))
        assert torch.equal(held[at + "self_attention.linear_proj.weight"],
                           weights[prefix + "self_attn.o_proj.weight"].chunk(2, dim=1)[tp])
        assert torch.equal(held[at + "mlp.linear_fc1.weight"],
                           torch.cat([weights[prefix + f"mlp.{n}_proj.weight"].chunk(2)[tp] for n in ("gate", "up")]))
        assert torch.equal(held[at + "mlp.linear_fc2.weight"],
                           weights[prefix + "mlp.down_proj.weight"].chunk(2, dim=1)[tp])
        assert torch.equal(held["output_layer.weight"], weights["lm_head.weight"].chunk(2)[tp])
        assert torch.equal(held[at + "pre_mlp_layernorm.weight"], weights[prefix + "post_attention_layernorm.weight"])
        assert "embedding.word_embeddings.weight" not in held


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_embedding_is_held_by_first_and_last_stage_only(pp, tied):
    model = spec(tie_word_embeddings=tied)
    layout = MegatronLayout(model, ParallelLayout(pp=pp))
    weights = canonical_weights(model)
    assert ("lm_head.weight" in weights) is not tied
    local = scatter(layout, weights)
    assert torch.equal(local[0]["embedding.word_embeddings.weight"], weights["model.embed_tokens.weight"])
    for middle in range(1, pp - 1):
        assert not {"embedding.word_embeddings.weight", "output_layer.weight"} & local[middle].keys()
    last = local[pp - 1].get("output_layer.weight")
    if pp == 1 and tied:
        assert last is None
    else:
        assert torch.equal(last, weights["model.embed_tokens.weight" if tied else "lm_head.weight"])


def test_te_names_move_only_the_norms():
    layout = [MegatronLayout(spec("qwen3"), ParallelLayout(tp=2), norm_names=names).local_shapes(0)
              for names in ("local", "te")]
    at = "decoder.layers.0."
    assert layout[0].keys() - layout[1].keys() == {f"decoder.layers.{i}.{n}.weight" for i in range(4)
                                                   for n in ("input_layernorm", "pre_mlp_layernorm")}
    assert layout[1][at + "self_attention.linear_qkv.layer_norm_weight"] == (16,)
    assert layout[1][at + "mlp.linear_fc1.layer_norm_weight"] == (16,)
    assert layout[1][at + "self_attention.q_layernorm.weight"] == (8,)


def test_padded_rows_have_no_box_even_when_a_rank_has_nothing_else():
    layout = MegatronLayout(spec(vocab_size=5), ParallelLayout(tp=4))
    assert [layout.padding(rank).get("output_layer.weight", 0) for rank in range(4)] == [0, 0, 16, 32]
    assert all(layout.check(rank) == [] for rank in range(4))


def test_layouts_import_no_torch():
    code = "import sys, rlhf_megatron.layouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
