"""Plans carried out by real gloo ranks: bit-equal, repeatedly, and refused on all ranks together."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from model_cases import canonical_weights, config, empty_like, scatter, spec, write_hf
from ranks import RanksFailed, run_ranks
from rlhf_megatron.layouts import HFLayout, MegatronLayout, ParallelLayout, make_plan
from rlhf_megatron.mcore.engine import MegatronEngine
from rlhf_megatron.reshard import ReshardError, Staging, compare, load_hf, save_hf
from rlhf_megatron.reshard import execute as execute_module
from rlhf_megatron.reshard import files as files_module
from rlhf_megatron.reshard.execute import execute


def _twice(rank, family, tied, degrees, dtype, round_bytes, alone):
    """Two reshards with changed weights in between, through the same buffers; returns this rank's figures."""
    execute_module.ALONE = alone  # in this forked rank only
    model = spec(family, tie_word_embeddings=tied, vocab_size=23)
    source, target = MegatronLayout(model, ParallelLayout(**degrees)), HFLayout(model, 4)
    plan, staging = make_plan(source, target, dtype.itemsize, round_bytes), Staging()
    into = empty_like(target, rank, dtype)
    for seed in range(2):
        weights = canonical_weights(model, seed=seed)
        local = scatter(source, weights)[rank]
        figures = execute(plan, local, into, staging=staging)
        assert all(torch.equal(into[name], weights[name].to(dtype)) for name in weights)
        assert compare(plan, local, into) == []
    assert figures.received == plan.for_rank(rank).elements_received * dtype.itemsize
    if rank == 2:
        into["model.layers.3.mlp.down_proj.weight"][5, 7] += 1
    assert compare(plan, local, into) == ["model.layers.3.mlp.down_proj.weight"]
    return figures.received, figures.sent, figures.copied, plan.bytes_moved


@pytest.mark.parametrize("degrees", [dict(tp=2, pp=2), dict(tp=2, dp=2), dict(pp=4), dict(pp=2, vpp=2, cp=2),
                                     dict(tp=2, pp=2, layers=(3, 1))])
@pytest.mark.parametrize("family, tied, dtype, round_bytes, alone", [
    ("llama", True, torch.float32, 1 << 20, 1 << 20),  # one round, everything packed
    ("qwen3", False, torch.bfloat16, 3000, 256),        # many rounds, conversion, large pieces alone
])
def test_megatron_to_four_full_replicas_is_bit_equal_twice(family, tied, degrees, dtype, round_bytes, alone):
    figures = run_ranks(4, _twice, family, tied, degrees, dtype, round_bytes, alone)
    assert sum(f[0] for f in figures) == sum(f[1] for f in figures) == figures[0][3]


def _between_megatron_layouts(rank):
    model = spec("qwen2", vocab_size=11)
    weights = canonical_weights(model)
    source = MegatronLayout(model, ParallelLayout(tp=2, pp=2))
    target = MegatronLayout(model, ParallelLayout(tp=4))
    into = {name: tensor.zero_() for name, tensor in empty_like(target, rank).items()}
    execute(make_plan(source, target), scatter(source, weights)[rank], into)
    expected = scatter(target, weights)[rank]
    assert all(torch.equal(into[name], expected[name]) for name in expected)


def test_megatron_to_megatron_with_padded_vocabulary():
    run_ranks(4, _between_megatron_layouts)


def _from_part_of_the_world(rank):
    """Ranks 0 and 1 train, ranks 2 and 3 only take weights."""
    model = spec()
    weights = canonical_weights(model)
    source, target = MegatronLayout(model, ParallelLayout(tp=2)), HFLayout(model, (2, 3))
    local = scatter(source, weights)[rank] if rank < 2 else {}
    into = empty_like(target, rank, torch.bfloat16) if rank >= 2 else {}
    plan = make_plan(source, target, 2)
    execute(plan, local, into)
    assert all(torch.equal(into[name], weights[name].bfloat16()) for name in into)
    assert compare(plan, local, into) == []


def test_weights_go_from_some_ranks_to_others_in_the_receivers_dtype():
    run_ranks(4, _from_part_of_the_world)


def _with_a_bad_rank(rank, fault):
    model = spec()
    source, target = MegatronLayout(model, ParallelLayout(tp=2)), HFLayout(model, 2)
    plan = make_plan(source, target, round_bytes=2000 if fault == "plan" and rank else 1 << 20)
    local, into = scatter(source, canonical_weights(model))[rank], empty_like(target, rank)
    if rank == 1 and fault == "missing":
        del local["decoder.layers.0.mlp.linear_fc1.weight"]
    if rank == 1 and fault == "dtype":
        into = empty_like(target, rank, torch.bfloat16)
    if fault == "shared":
        into["lm_head.weight"] = torch.cat([local["output_layer.weight"]] * 2)
        if rank == 1:
            local["output_layer.weight"] = into["lm_head.weight"][11:]
    with pytest.raises(ReshardError) as error:
        execute(plan, local, into)
    dist.barrier()  # nothing was left in flight: the group still works
    return str(error.value)


@pytest.mark.parametrize("fault, at_fault, elsewhere", [
    ("missing", "missing tensors decoder.layers.0.mlp.linear_fc1.weight", "ranks [1] refused"),
    ("dtype", "must have one dtype", "must have one dtype"),
    ("plan", "different plans", "different plans"),
    ("shared", "share storage", "ranks [1] refused"),
])
def test_a_fault_of_one_rank_is_refused_by_all_before_anything_is_sent(fault, at_fault, elsewhere):
    said = run_ranks(2, _with_a_bad_rank, fault, timeout=30)
    assert at_fault in said[1] and elsewhere in said[0]


def _load_and_export(rank, directory, out, degrees, tied):
    model = spec(vocab_size=11, tie_word_embeddings=tied)
    layout = MegatronLayout(model, ParallelLayout(**degrees))
    tensors = empty_like(layout, rank)
    assert load_hf(directory, layout, rank, tensors) == []
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    save_hf(out, layout, rank, tensors, source_dir=directory, max_shard_bytes=3000)
    return os.path.exists(os.path.join(out, "config.json"))  # there for every rank when save_hf returns


def written(directory):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize("degrees, tied", [(dict(tp=2, pp=2), False), (dict(tp=4), False), (dict(pp=4), True),
                                           (dict(tp=2, pp=2, vpp=2), True)])
def test_files_to_megatron_to_files_is_bit_equal(tmp_path, degrees, tied):
    weights = canonical_weights(spec(vocab_size=11, tie_word_embeddings=tied))
    directory = write_hf(tmp_path / "hf", config(vocab_size=11, tie_word_embeddings=tied), weights)
    assert run_ranks(4, _load_and_export, directory, tmp_path / "out", degrees, tied) == [True] * 4
    assert written(tmp_path / "out").keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in written(tmp_path / "out").items())


# ---- tied embeddings over any number of stages ----

SMALL = dict(hidden_size=8, vocab_size=10, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16)


def _import_and_export(rank, directory, out, degrees, tied):
    """Into the real model and out again -> what it holds beside its layers."""
    engine = MegatronEngine(spec(**SMALL, tie_word_embeddings=tied), ParallelLayout(**degrees), trainable=False)
    layout = MegatronLayout(engine.spec, engine.layout)
    load_hf(directory, layout, rank, engine.tensors())
    held = {name: tensor.clone() for name, tensor in engine.tensors().items() if "layers" not in name}
    save_hf(out, layout, rank, engine.tensors(), source_dir=directory)
    return held


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("degrees", [dict(), dict(pp=2), dict(pp=3, layers=(1, 2, 1)), dict(pp=4), dict(pp=2, vpp=2)])
def test_embeddings_of_first_and_last_stage_are_the_file_s(tmp_path, degrees, tied):
    """NVIDIA-NeMo/Megatron-Bridge#954: with tied embeddings and more than two stages the import broke."""
    weights = canonical_weights(spec(**SMALL, tie_word_embeddings=tied))
    assert ("lm_head.weight" in weights) is not tied
    directory = write_hf(tmp_path / "hf", config(**SMALL, tie_word_embeddings=tied), weights)
    held = run_ranks(degrees.get("pp", 1), _import_and_export, directory, tmp_path / "out", degrees, tied, timeout=50)
    matrices = [{name: tensor for name, tensor in stage.items() if tensor.dim() == 2} for stage in held]
    assert all(not stage for stage in matrices[1:-1]), "a middle stage holds an embedding"
    (embedding,) = (t for name, t in matrices[0].items() if name.endswith("embedding.word_embeddings.weight"))
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])
    outputs = [t for name, t in matrices[-1].items() if name.endswith("output_layer.weight")]
    assert len(outputs) == (0 if tied and not degrees else 1)
    for output in outputs:
        assert torch.equal(output, weights["model.embed_tokens.weight" if tied else "lm_head.weight"])
    exported = written(tmp_path / "out")
    assert exported.keys() == weights.keys()  # no invented lm_head.weight
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied


def _export_onto_a_full_disk(rank, out):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    files_module.save_file = full  # in this forked rank only
    model = spec()
    layout = MegatronLayout(model, ParallelLayout(tp=2))
    with pytest.raises((OSError, ValueError)) as error:
        save_hf(out, layout, rank, scatter(layout, canonical_weights(model))[rank], max_shard_bytes=3000)
    return str(error.value)


def test_a_full_disk_is_told_to_every_rank(tmp_path):
    said = run_ranks(2, _export_onto_a_full_disk, tmp_path / "out", timeout=30)
    assert "No space left" in said[0] and "failed on its writing rank" in said[1]
    assert os.listdir(tmp_path) == []


def _fail(rank, how):
    if rank == 1 and how == "raise":
        raise KeyError("an odd name")
    if rank == 1 and how == "exit":
        os._exit(7)
    if how == "hang" and rank == 0:
        time.sleep(100)
    dist.barrier()


@pytest.mark.parametrize("how, said", [("raise", "rank 1 of 2: .*an odd name"), ("hang", "did not end within 2 s"),
                                       ("exit", "rank 1 of 2: ended with code 7")])
def test_the_test_launcher_reports_ranks_that_fail(how, said):
    with pytest.raises(RanksFailed, match="(?s)" + said):
        run_ranks(2, _fail, how, timeout=30 if how != "hang" else 2)
