"""The engine under TP, PP and DP equals itself on one rank, and transformers; gradients do not see the split."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from engines import (
    ACTOR,
    LENGTHS,
    PPO,
    LinearLoss,
    denominator,
    example_batch,
    make_engine,
    my_rows,
)
from ranks import run_ranks
from rlhf_megatron.algorithms.losses import ActorLoss
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.observe.metrics import merge
from splits import LOSSES, rollout
from tiny import VOCAB, canonical, join, read_out, relative, settings, tiny_spec


class NoGraphLoss:
    """What a loss may make of a micro-batch without valid tokens: a constant."""

    reads = ()

    def __call__(self, outputs, fields, meta):
        return torch.zeros(()), {}


# ---- training: every layout against one rank ----


def _train(rank, degrees, name, micro, batch, tied=False, dtype="float32", **more):
    """Gradients and weights of one SGD update at lr 1, and losses, norms and weights of three Adam updates."""
    head, loss, _ = LOSSES[name]
    spec = tiny_spec(tied=tied)
    layout = ParallelLayout.build(dist.get_world_size(), **degrees)
    result = {}
    sgd = settings(name="sgd", lr=1.0, clip_grad=0.0)
    engine, where = make_engine(spec, layout, head, micro, sgd, dtype=dtype, **more)
    engine.keep_gradients = True
    engine.train_step(my_rows(batch, engine), loss, temperature=0.7, entropy=name == "grpo")
    result["gradients"] = read_out(where, rank, engine.gradients())
    result["sgd"] = read_out(where, rank, engine.tensors())
    engine, _ = make_engine(spec, layout, head, micro, settings(lr=1e-4, weight_decay=0.1), dtype=dtype, **more)
    steps = [engine.train_step(my_rows(batch, engine), loss, 0.7, entropy=name == "grpo") for _ in range(3)]
    result["adam"] = read_out(where, rank, engine.tensors())
    result["norms"] = [step["grad_norm"].value for step in steps]
    value = "critic/loss" if head == "value" else "actor/loss"
    result["losses"] = [step[value] if engine.is_output else None for step in steps]
    return result


def _trained(ranks, degrees, name, micro, tied=False, **more):
    """`_train` on that many ranks, put together to canonical tensors."""
    train = partial(_train, tied=tied, **more)
    results = run_ranks(ranks, train, degrees, name, micro, rollout(name, tied))
    spec = tiny_spec(tied=tied)
    where = MegatronLayout(spec, ParallelLayout.build(len(results), **degrees), head=LOSSES[name][0])
    out = {kind: join(where, [r[kind] for r in results], 1e-5) for kind in ("gradients", "sgd", "adam")}
    out["norms"] = results[0]["norms"]
    assert all(r["norms"] == out["norms"] for r in results), "ranks disagree about the norm"
    out["losses"] = [merge([{"loss": r["losses"][i]} for r in results if r["losses"][i] is not None])["loss"].value
                     for i in range(3)]
    return out


_REFERENCE: dict = {}


def reference(name, tied=False):
    """The same on one rank, all rows in one micro-batch."""
    if (name, tied) not in _REFERENCE:
        _REFERENCE[name, tied] = _trained(1, {}, name, 8, tied)
    return _REFERENCE[name, tied]


def assert_same(ours, exact):
    for kind in ("gradients", "sgd"):
        for name, tensor in exact[kind].items():
            assert relative(ours[kind][name], tensor) < 1e-5, (kind, name)
    for a, b in zip(ours["losses"], exact["losses"], strict=True):
        assert abs(a - b) < 1e-5
    assert ours["losses"][0] != ours["losses"][2], "three updates changed nothing"
    assert ours["norms"][0] == pytest.approx(exact["norms"][0], rel=1e-5)
    assert ours["norms"] == pytest.approx(exact["norms"], rel=1e-3)  # Adam enlarges rounding of tiny gradients


SPLITS = [  # ranks, degrees, rows of a micro-batch, options; the split of the gradients alone is in test_splits.py
    (1, {}, 3, {}), (2, {"tp": 2}, 1, {}), (2, {}, 2, {"overlap": True, "packing": True}), (4, {"pp": 4}, 2, {}),
    (4, {"pp": 2, "cp": 2, "vpp": 2}, 3, {"packing": True}), (8, {"tp": 2, "pp": 2}, 2, {"sequence_parallel": True}),
    (4, {"tp": 2, "cp": 2}, 1, {"sequence_parallel": True, "tokens": 28, "packing": True, "overlap": True}),
]


@pytest.mark.parametrize(("ranks", "degrees", "micro", "options"), SPLITS)
@pytest.mark.parametrize("name", ["ppo actor", "ppo critic", "grpo"])
def test_training_equals_one_rank(ranks, degrees, micro, options, name):
    assert_same(_trained(ranks, degrees, name, micro, **options), reference(name))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(("ranks", "tp", "pp", "sp"), [(1, 1, 1, False), (2, 1, 2, False), (4, 2, 2, True)])
def test_recomputed_activations(ranks, tp, pp, sp, recompute):
    degrees = {"tp": tp, "pp": pp}
    assert_same(_trained(ranks, degrees, "grpo", 2, sequence_parallel=sp, recompute=recompute), reference("grpo"))


def test_bf16_trains_under_every_layout():
    """bf16 rounds differently under another layout, so only the first norm is comparable, and that roughly."""
    one = run_ranks(1, _train, {}, "linear", 4, rollout("linear"), False, "bfloat16")
    split = run_ranks(4, _train, {"tp": 2}, "linear", 2, rollout("linear"), False, "bfloat16")
    assert split[0]["norms"][0] == pytest.approx(one[0]["norms"][0], rel=0.02)
    assert one[0]["norms"][0] == pytest.approx(reference("linear")["norms"][0], rel=0.02)


def _masters(rank):
    layout = ParallelLayout.build(2, 1, 1)
    batch = example_batch()
    engine, where = make_engine(tiny_spec(), layout, optimizer=settings(lr=1e-5), dtype="bfloat16")
    before = read_out(where, rank, engine.tensors())
    for _ in range(60):  # 60 x 1e-5 is a visible change of a weight of 0.1, one update is not (bf16 has 8 bits)
        engine.train_step(my_rows(batch, engine), LinearLoss())
    after = read_out(where, rank, engine.tensors())
    return sum((a[3] != b[3]).sum().item() for a, b in zip(before, after, strict=True))


def test_small_bf16_updates_add_up():
    assert min(run_ranks(2, _masters)) > 1000


# ---- scoring ----


def _score(rank, tp, pp, head, micro, tied, seed, dtype="float32"):
    layout = ParallelLayout.build(dist.get_world_size(), tp, pp)
    engine, _ = make_engine(tiny_spec(tied=tied), layout, head, micro, trainable=False, seed=seed, dtype=dtype)
    out = engine.forward(my_rows(example_batch(), engine), temperature=0.7, entropy=head == "lm")
    assert (out is None) == (not engine.is_output)
    return None if out is None else {name: out[name].to_list() for name in out.names()}


def scored(ranks, tp, pp, head="lm", micro=2, tied=False):
    outputs = [r for r in run_ranks(ranks, _score, tp, pp, head, micro, tied, 0) if r is not None]
    return {name: [row for replica in outputs for row in replica[name]] for name in outputs[0]}


def transformers_log_probs(tied):
    """log_probs and entropy of every response token by transformers, one row at a time, without padding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = tiny_spec(tied=tied)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
                         rms_norm_eps=1e-6, tie_word_embeddings=tied, attn_implementation="eager",
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = LlamaForCausalLM(config)
    weights = canonical(MegatronLayout(spec, ParallelLayout.build(1)))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    batch = example_batch()
    log_probs, entropies = [], []
    for prompt, response in zip(batch["prompts"], batch["responses"], strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].double() / 0.7
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(-1, response[:, None])[:, 0].tolist())
        entropies.append((-(log_p.exp() * log_p).sum(-1)).tolist())
    return {"log_probs": log_probs, "entropy": entropies}


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_equal_transformers(tied):
    """Each response token is scored by the position before it, at the sampling temperature, whatever the padding."""
    exact = transformers_log_probs(tied)
    for ranks, tp, pp, micro in [(1, 1, 1, 3), (8, 2, 2, 2)]:
        ours = scored(ranks, tp, pp, micro=micro, tied=tied)
        for name in ("log_probs", "entropy"):
            assert [len(row) for row in ours[name]] == [r for _, r in LENGTHS]
            flat = [torch.tensor([x for row in side[name] for x in row]) for side in (ours, exact)]
            torch.testing.assert_close(*flat, atol=2e-5, rtol=0)


def test_values_do_not_depend_on_the_layout():
    one, split = scored(1, 1, 1, "value", 8), scored(8, 2, 2, "value", 3)
    flat = [torch.tensor([x for row in side["values"] for x in row]) for side in (one, split)]
    assert flat[0].abs().max() > 0.1
    torch.testing.assert_close(*flat, atol=1e-5, rtol=0)


# ---- one denominator ----


def _token_mean(rank, micro, dp):
    """Responses of 2 and 6 tokens, advantages +1 and -0.5, ratio 1."""
    lengths = torch.tensor([2, 6])
    layout = ParallelLayout.build(dist.get_world_size())
    engine, where = make_engine(tiny_spec(), layout, micro=micro, optimizer=settings(name="sgd", lr=0.0, clip_grad=0.0))
    engine.keep_gradients = True
    batch = DataProto(tensors={
        "prompts": Ragged.from_list([[1, 2], [3]]),
        "responses": Ragged(torch.arange(8) + 4, lengths),
        "response_mask": Ragged(torch.ones(8, dtype=torch.bool), lengths),
        "advantages": Ragged(torch.tensor([1.0] * 2 + [-0.5] * 6), lengths),
    }, meta={"denominator": 8.0})
    rows = batch.chunk(dp)[engine.coordinates.dp]
    rows = rows.union(engine.forward(rows).rename({"log_probs": "old_log_probs"}))
    value = {}

    class Recorded(ActorLoss):
        def __call__(self, outputs, fields, meta):
            scalar, metrics = super().__call__(outputs, fields, meta)
            value["sum"] = value.get("sum", 0.0) + scalar.item()
            return scalar, metrics

    engine.train_step(rows, Recorded(PPO))
    return value["sum"], read_out(where, rank, engine.gradients())


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_token_mean_is_over_the_mini_batch(micro, dp):
    results = run_ranks(dp, _token_mean, micro, dp)
    assert sum(value for value, _ in results) == pytest.approx(0.125, abs=1e-6)
    where = MegatronLayout(tiny_spec(), ParallelLayout.build(1))
    exact = join(where, [run_ranks(1, _token_mean, 2, 1)[0][1]])
    for name, tensor in join(where, [pieces for _, pieces in results], 1e-6).items():
        assert relative(tensor, exact[name]) < 1e-5, name


# ---- updates that must not happen, and replicas with nothing to say ----


def _weights_after(rank, kind):
    layout = ParallelLayout.build(2, 1, 1)
    engine, _ = make_engine(tiny_spec(), layout, optimizer=settings(schedule="linear"))
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    batch = example_batch()
    if kind == "nan" and rank == 1:
        batch["advantages"].values[batch["response_mask"].values.nonzero()[-1]] = math.nan
    if kind == "empty":
        batch.meta["denominator"] = 0
    metrics = engine.train_step(my_rows(batch, engine), ACTOR)
    same = all(torch.equal(before[name], tensor) for name, tensor in engine.tensors().items())
    after = engine.train_step(my_rows(example_batch(), engine), ACTOR)
    changed = any(not torch.equal(before[name], tensor) for name, tensor in engine.tensors().items())
    return same, metrics, changed, after["lr"].value, engine.step, engine.skipped_steps


@pytest.mark.parametrize("kind", ["nan", "empty"])
def test_an_update_without_a_finite_gradient_is_skipped_on_all_ranks(kind):
    results = run_ranks(2, _weights_after, kind)
    assert merge([r[1] for r in results])["skipped"].value == 1
    for same, metrics, changed, rate, step, skipped in results:
        assert same and changed and "grad_norm" not in metrics
        assert (step, skipped) == (1, 1)
        assert rate == pytest.approx(1e-2), "a skipped update must not move the schedule"


def _quiet_replica(rank, kind):
    """Replica 1 has only masked rows, no rows, or a loss that forgets its inputs."""
    layout = ParallelLayout.build(4, 2, 1)
    engine, where = make_engine(tiny_spec(), layout, optimizer=settings(name="sgd", lr=1.0, clip_grad=0.0))
    engine.keep_gradients = True
    batch = example_batch()
    first, second = batch.split([4, 4])
    second["response_mask"].values.fill_(False)
    if kind == "no_rows":
        second = batch.split([8, 0])[1]
    mine = (first, second)[engine.coordinates.dp]
    mine.meta["denominator"] = denominator(first)
    engine.train_step(mine, NoGraphLoss() if kind == "constant" and engine.coordinates.dp else ACTOR)
    alone, _ = make_engine(tiny_spec(), layout, optimizer=settings(name="sgd", lr=1.0, clip_grad=0.0))
    alone.keep_gradients = True
    half = first.split([2, 2])[alone.coordinates.dp]
    half.meta["denominator"] = mine.meta["denominator"]
    alone.train_step(half, ACTOR)
    return max(relative(g, alone.gradients()[name]) for name, g in engine.gradients().items()
               if alone.gradients()[name].abs().max() > 0)


@pytest.mark.parametrize("kind", ["masked", "no_rows", "constant"])
def test_a_replica_with_nothing_to_learn_takes_part(kind):
    assert max(run_ranks(4, _quiet_replica, kind)) < 1e-5


def _clipped(rank):
    layout = ParallelLayout.build(2, 2, 1)
    changes = []
    for clip in (0.0, 0.01):
        engine, where = make_engine(tiny_spec(), layout, optimizer=settings(name="sgd", lr=1.0, clip_grad=clip))
        before = read_out(where, rank, engine.tensors())
        norm = engine.train_step(example_batch(), ACTOR)["grad_norm"].value
        after = read_out(where, rank, engine.tensors())
        changes.append((norm, [(*a[:3], b[3] - a[3]) for a, b in zip(before, after, strict=True)]))
    return changes


def test_gradients_are_clipped_by_their_global_norm():
    results = run_ranks(2, _clipped)
    where = MegatronLayout(tiny_spec(), ParallelLayout.build(2, 2))
    for i, clip in enumerate((None, 0.01)):
        change = join(where, [r[i][1] for r in results], 1e-7)
        length = math.sqrt(sum(tensor.double().square().sum().item() for tensor in change.values()))
        norm = results[0][i][0]
        assert norm > 0.02 and length == pytest.approx(clip or norm, rel=1e-3)


def _no_optimizer(rank):
    engine, _ = make_engine(tiny_spec(), ParallelLayout.build(1), trainable=False)
    with pytest.raises(RuntimeError, match="trainable=False"):
        engine.train_step(example_batch(), ACTOR)
    with pytest.raises(RuntimeError, match="keep_gradients"):
        engine.gradients()
    shapes = MegatronLayout(tiny_spec(), engine.layout).local_shapes(rank)
    assert {name: tuple(t.shape) for name, t in engine.tensors().items()} == shapes


def test_a_frozen_engine_only_scores():
    run_ranks(1, _no_optimizer)
