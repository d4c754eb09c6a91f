"""Reading slices of HF directories into Megatron ranks, and exporting them again."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_cases import canonical_weights, config, empty_like, scatter, spec, write_hf
from rlhf_megatron.layouts import MegatronLayout, ParallelLayout, read_config, read_spec
from rlhf_megatron.reshard import CheckpointError, load_hf, save_hf


def _load(directory, layout, dtype=torch.float32):
    found = {rank: empty_like(layout, rank, dtype) for rank in layout.ranks}
    absent = [load_hf(directory, layout, rank, tensors) for rank, tensors in found.items()]
    return found, absent[0]


def _one(model, head="lm"):
    return MegatronLayout(model, ParallelLayout(), head)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_slices_equal_the_scattered_weights(tmp_path, family, shards):
    source = config(family, vocab_size=11)
    directory = write_hf(tmp_path / "hf", source, canonical_weights(spec(family, vocab_size=11)), shards)
    model = read_spec(directory)
    for degrees in (dict(tp=2, pp=2), dict(tp=4), dict(pp=4, dp=2)):
        layout = MegatronLayout(model, ParallelLayout(**degrees))
        found, absent = _load(directory, layout)
        assert absent == []
        for rank, tensors in scatter(layout, canonical_weights(model)).items():
            assert all(torch.equal(found[rank][name], tensor) for name, tensor in tensors.items())


def test_values_are_converted_to_the_parameters_dtype(tmp_path):
    weights = canonical_weights(spec())
    directory = write_hf(tmp_path / "hf", config(), weights)
    found, _ = _load(directory, _one(spec()), torch.bfloat16)
    assert torch.equal(found[0]["embedding.word_embeddings.weight"], weights["model.embed_tokens.weight"].bfloat16())


@pytest.mark.parametrize("tied", [True, False])
def test_export_has_the_same_keys_values_and_tied_flag_as_the_source(tmp_path, tied):
    source = config(vocab_size=11, tie_word_embeddings=tied, some_extra_key=7)
    model = spec(vocab_size=11, tie_word_embeddings=tied, some_extra_key=7)
    weights = canonical_weights(model)
    directory = write_hf(tmp_path / "hf", source, weights)
    for name, text in (("tokenizer.json", "{}"), ("chat_template.jinja", "{{ x }}"), ("generation_config.json", "{}"),
                       ("README.md", "not copied")):
        (directory / name).write_text(text)
    found, _ = _load(directory, _one(model))
    out = save_hf(tmp_path / "deep" / "out", _one(model), 0, found[0], source_dir=directory)
    written = load_file(out / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert {**read_config(out), "dtype": None} == {**source, "head_dim": 2, "dtype": None}
    assert read_config(out)["dtype"] == "float32"
    assert sorted(os.listdir(out)) == ["chat_template.jinja", "config.json", "generation_config.json",
                                       "model.safetensors", "tokenizer.json"]
    assert os.listdir(out.parent) == ["out"]  # nothing temporary is left


def test_export_in_shards_with_an_index_loads_again(tmp_path):
    model = spec("qwen3")
    weights = canonical_weights(model, dtype=torch.bfloat16)
    layout = _one(model)
    local = scatter(layout, weights, torch.float32)[0]
    out = save_hf(tmp_path / "out", layout, 0, local, dtype=torch.bfloat16, max_shard_bytes=2000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    for file in files:
        with safe_open(out / file, "pt") as handle:
            sizes = [handle.get_tensor(name).nbytes for name in handle.keys()]
        assert len(sizes) == 1 or sum(sizes) <= 2000
    back, _ = _load(out, layout)
    assert all(torch.equal(back[0][name], local[name]) for name in local)


def test_value_head_is_initialised_by_the_caller_and_exported(tmp_path):
    model = spec(tie_word_embeddings=True)
    directory = write_hf(tmp_path / "hf", config(tie_word_embeddings=True), canonical_weights(model))
    layout = _one(model, "value")
    tensors = empty_like(layout, 0)
    tensors["output_layer.weight"].fill_(0.25)
    assert load_hf(directory, layout, 0, tensors) == ["score.weight"]
    assert torch.equal(tensors["output_layer.weight"], torch.full((1, 16), 0.25))
    out = save_hf(tmp_path / "critic", layout, 0, tensors)
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert read_config(out)["architectures"] == ["LlamaForTokenClassification"]
    again = empty_like(layout, 0)
    assert load_hf(out, layout, 0, again) == []
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_missing_unknown_misshapen_and_foreign_types_are_named_before_reading(tmp_path):
    weights = canonical_weights(spec())
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.gate.weight"] = torch.zeros(2)
    weights["model.norm.weight"] = torch.zeros(3)
    weights["lm_head.weight"] = torch.zeros(22, 16, dtype=torch.int8)
    directory = write_hf(tmp_path / "hf", config(), weights)
    tensors = empty_like(_one(spec()), 0)
    with pytest.raises(CheckpointError) as error:
        load_hf(directory, _one(spec()), 0, tensors)
    for said in ("missing: model.layers.2.mlp.up_proj.weight", "unknown: model.layers.0.self_attn.gate.weight",
                 "model.norm.weight (3,) instead of (16,)", "I8"):
        assert said in str(error.value)
    assert all(tensor.isnan().all() for tensor in tensors.values())


def test_a_second_copy_of_a_tied_head_is_ignored_only_when_the_config_says_tied(tmp_path):
    weights = canonical_weights(spec())
    directory = write_hf(tmp_path / "hf", config(), weights)
    found, _ = _load(directory, _one(spec(tie_word_embeddings=True)))
    assert "output_layer.weight" not in found[0]
    del weights["lm_head.weight"]
    write_hf(directory, config(), weights)
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        _load(directory, _one(spec()))


def test_a_model_with_an_unknown_or_lacking_parameter_is_named(tmp_path):
    model = spec()
    local = scatter(_one(model), canonical_weights(model))[0]
    directory = write_hf(tmp_path / "hf", config(), canonical_weights(model))
    odd = {**local, "layers.0.self_attention.linear_xyz.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="linear_xyz"):
        load_hf(directory, _one(model), 0, odd)
    with pytest.raises(RuntimeError, match="linear_xyz"):
        save_hf(tmp_path / "out", _one(model), 0, odd)
    del local["decoder.layers.1.mlp.linear_fc1.weight"]
    with pytest.raises(RuntimeError, match="missing tensors decoder.layers.1.mlp.linear_fc1.weight"):
        save_hf(tmp_path / "out", _one(model), 0, local)
    assert sorted(os.listdir(tmp_path)) == ["hf"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..", 7])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path, name):
    directory = write_hf(tmp_path / "hf", config(), canonical_weights(spec()), shards=2)
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="only plain file names"):
        _load(directory, _one(spec()))


def test_a_link_may_lead_to_the_hub_caches_blobs_only(tmp_path):
    weights = canonical_weights(spec())
    directory = write_hf(tmp_path / "models--x" / "snapshots" / "abc", config(), weights)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    os.rename(directory / "model.safetensors", blobs / "123")
    (directory / "model.safetensors").symlink_to("../../blobs/123")
    _load(directory, _one(spec()))
    os.rename(blobs / "123", tmp_path / "elsewhere")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        _load(directory, _one(spec()))


def test_broken_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        _load(tmp_path / "nowhere", _one(spec()))
    directory = write_hf(tmp_path / "hf", config(), canonical_weights(spec()), shards=2)
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    moved = {**listed["weight_map"], "model.norm.weight": "model-00001-of-00002.safetensors"}
    both = {**moved, "model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": both}))
    with pytest.raises(CheckpointError, match="does not agree with the files about model.embed_tokens.weight"):
        _load(directory, _one(spec()))
    save_file({"model.norm.weight": torch.zeros(16), "lm_head.weight": torch.zeros(22, 16)},
              directory / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="tensors in two files: .*model-00001"):
        _load(directory, _one(spec()))
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        _load(directory, _one(spec()))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors: named by"):
        _load(directory, _one(spec()))
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not an index"):
        _load(directory, _one(spec()))


def test_a_failing_disk_leaves_nothing_and_an_existing_export_is_kept(tmp_path, monkeypatch):
    model = spec()
    local = scatter(_one(model), canonical_weights(model))[0]
    out = save_hf(tmp_path / "out", _one(model), 0, local)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists; choose another"):
        save_hf(out, _one(model), 0, local)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    changed = {name: tensor + 1 for name, tensor in local.items()}
    monkeypatch.setattr("rlhf_megatron.reshard.files.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_hf(out, _one(model), 0, changed, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before and os.listdir(tmp_path) == ["out"]
    monkeypatch.undo()
    save_hf(out, _one(model), 0, changed, overwrite=True)
    assert torch.equal(load_file(out / "model.safetensors")["model.norm.weight"],
                       changed["decoder.final_layernorm.weight"])
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_a_directory_of_transformers_goes_through_and_computes_the_same(tmp_path, family, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(family, **{k: v for k, v in config(family).items() if k not in
                                                        ("model_type", "architectures", "tie_word_embeddings")},
                                             tie_word_embeddings=tied)
    theirs = transformers.AutoModelForCausalLM.from_config(made).eval()
    theirs.save_pretrained(tmp_path / "hf")
    model = read_spec(tmp_path / "hf")
    assert model.tied is tied
    found, _ = _load(tmp_path / "hf", _one(model))
    out = save_hf(tmp_path / "out", _one(model), 0, found[0], source_dir=tmp_path / "hf")
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    again, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.tensor([[1, 5, 3, 20]])
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)
        # and a critic's export is a token classifier with one number per token and no bias
        layout = _one(model, "value")
        tensors = {**found[0], "output_layer.weight": torch.randn(1, 16)}
        critic = save_hf(tmp_path / "critic", layout, 0, tensors)
        classifier, report = transformers.AutoModelForTokenClassification.from_pretrained(critic,
                                                                                          output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        hidden = theirs.model(tokens).last_hidden_state
        values = classifier.eval()(tokens).logits
        torch.testing.assert_close(values, hidden @ tensors["output_layer.weight"].T)
