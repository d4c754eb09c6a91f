"""No split changes the result: every loss under every split, however the micro-batches are formed, equals one process.

docs/splits.md has the measured differences.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from engines import LinearLoss, example_batch, make_engine, my_rows
from ranks import run_ranks
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.mcore import engine as engine_module
from splits import BATCHINGS, SPLITS, differences, exact, updates
from tiny import join, read_out, relative, settings, tiny_spec


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", ["ppo actor", "ppo critic", "grpo"])
def test_an_update_equals_one_process(how, name):
    batchings = list(BATCHINGS.values())
    for batching, ours in zip(BATCHINGS, updates(SPLITS[how], name, batchings), strict=True):
        for kind, difference in differences(ours, exact(name)).items():
            assert difference < 1e-5, (batching, kind)
        assert ours["norm"] == pytest.approx(exact(name)["norm"], rel=1e-5)


TWO_WAYS = [dict(micro=2), dict(micro=1, tokens=28, packing=True)]


@pytest.mark.parametrize("how", SPLITS)
def test_tied_embeddings(how):
    for ours in updates(SPLITS[how], "grpo", TWO_WAYS, tied=True):
        for kind, difference in differences(ours, exact("grpo", tied=True)).items():
            assert difference < 1e-5, kind


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("how", ["PP2 VPP2", "TP2 CP2 SP"])
def test_recomputed_activations_of_packed_rows(how, recompute):
    recomputing = SPLITS[how]._replace(options=(*SPLITS[how].options, ("recompute", recompute)))
    for ours in updates(recomputing, "grpo", TWO_WAYS):
        assert max(differences(ours, exact("grpo")).values()) < 1e-5


# ---- overlapped communication ----


def _trained(rank, layout, tied, overlap, dtype):
    """Scores and weights after each of five updates, the micro-batches of one row each."""
    engine, where = make_engine(tiny_spec(tied=tied), layout, micro=1, optimizer=settings(), dtype=dtype,
                                overlap=overlap)
    found = []
    for seed in range(5):
        engine.train_step(my_rows(example_batch(seed=seed), engine), LinearLoss())
        scored = engine.forward(my_rows(example_batch(), engine)) if seed != 3 else None  # twice in a row: nothing read
        found.append((None if scored is None else scored["log_probs"].values,
                      {name: tensor.clone() for name, tensor in engine.tensors().items()} if seed != 2 else {}))
    return found


@pytest.mark.parametrize(("ranks", "degrees", "tied", "dtype"), [
    (2, {}, False, "bfloat16"), (2, {}, True, "float32"), (4, {"pp": 2}, True, "bfloat16"),
    (4, {"pp": 2}, False, "float32"), (4, {"pp": 2, "vpp": 2}, True, "float32"),
    (4, {"pp": 2, "vpp": 2}, False, "bfloat16"), (4, {"cp": 2}, True, "bfloat16"), (4, {"cp": 2}, False, "float32"),
])
def test_overlap_changes_no_bit(ranks, degrees, tied, dtype):
    """Also not when the weights are read, or scored with, while their gathering is still on its way."""
    layout = ParallelLayout.build(ranks, **degrees)
    plain, overlapped = (run_ranks(ranks, _trained, layout, tied, overlap, dtype) for overlap in (False, True))
    for ours, theirs in zip(overlapped, plain, strict=True):
        for (scores, weights), (plain_scores, plain_weights) in zip(ours, theirs, strict=True):
            assert (scores is None) == (plain_scores is None)
            assert scores is None or torch.equal(scores, plain_scores)
            assert weights.keys() == plain_weights.keys()
            assert all(torch.equal(tensor, plain_weights[name]) for name, tensor in weights.items())
    assert any(scores is not None for per_rank in plain for scores, _ in per_rank)


def _kept(rank, overlap, bucket_size):
    """Gradients of three updates, and the weights after them, in buckets of that size."""
    if bucket_size:
        config = engine_module.DistributedDataParallelConfig  # in this forked rank only
        engine_module.DistributedDataParallelConfig = partial(config, bucket_size=bucket_size)
    engine, _ = make_engine(tiny_spec(), ParallelLayout.build(2), micro=1, optimizer=settings(clip_grad=0.0),
                            overlap=overlap)
    engine.keep_gradients, found = True, []
    for seed in range(3):
        engine.train_step(my_rows(example_batch(seed=seed), engine), LinearLoss())
        found.append(engine.gradients())
    weights = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    return [*found, weights], len(engine.ddp[0].buffers[0].buckets)


@pytest.mark.parametrize("bucket_size", [None, 700])
def test_gradients_are_whole_however_they_are_reduced(bucket_size):
    """Many buckets are reduced one by one, while backward goes on; of the sums over them only the norm's order differs,
    which clipping would show in the last bits."""
    plain, overlapped = run_ranks(2, _kept, False, None), run_ranks(2, _kept, True, bucket_size)
    for (exact_tensors, _), (tensors, buckets) in zip(plain, overlapped, strict=True):
        assert (buckets > 5) == bool(bucket_size)
        for one, other in zip(exact_tensors, tensors, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def _tied_copies(rank, layout, dtype, overlap):
    """The embedding that this rank holds at its beginning and at its end, after each of five updates."""
    engine, _ = make_engine(tiny_spec(tied=True), layout, micro=2, optimizer=settings(), dtype=dtype, overlap=overlap)
    copies = []
    for seed in range(5):
        engine.train_step(my_rows(example_batch(seed=seed), engine), LinearLoss())
        copies.append({name: tensor.clone() for name, tensor in engine.tensors().items() if "layers" not in name})
    return copies


@pytest.mark.parametrize(("overlap", "dtype"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2},
                                     {"pp": 2, "cp": 2}])
def test_both_copies_of_a_tied_embedding_stay_bit_equal(degrees, overlap, dtype, ranks=4):
    """Only the first and the last stage hold it; stages between hold neither copy and wait for nobody."""
    layout = ParallelLayout.build(ranks, **degrees)
    found = run_ranks(ranks, _tied_copies, layout, dtype, overlap)
    for rank, copies in enumerate(found):
        at = layout.coordinates(rank)
        held = {name for name in copies[0] if "embedding" in name or "output_layer" in name}
        assert len(held) == (at.pp in (0, layout.pp - 1)), held
        first = found[layout.rank_of(tp=at.tp, pp=0, cp=at.cp, dp=at.dp)]
        (embedding,) = (name for name in first[0] if name.endswith("embedding.word_embeddings.weight"))
        if at.pp == layout.pp - 1:
            for step in range(5):
                (here,) = (copies[step][name] for name in held)
                assert torch.equal(here, first[step][embedding])
        assert not torch.equal(first[0][embedding], first[4][embedding])


# ---- replicas with unlike numbers of micro-batches ----


def _unlike(rank, lengths, packing, pp, vpp):
    """How often each chunk ran, and the gradients, of rows with these (prompt, response) lengths, by replica."""
    layout = ParallelLayout.build(dist.get_world_size(), pp=pp, vpp=vpp)
    engine, where = make_engine(tiny_spec(), layout, optimizer=settings(name="sgd", lr=1.0, clip_grad=0.0),
                                tokens=8, packing=packing)
    engine.keep_gradients = True
    batch = example_batch([pair for replica in lengths for pair in replica])
    parts = batch.split([len(replica) for replica in lengths]) if layout.dp > 1 else [batch]
    passes = []
    for chunk in engine.chunks:
        chunk.decoder.register_forward_hook(lambda *_: passes.append("forward"))
        chunk.decoder.register_full_backward_hook(lambda *_: passes.append("backward"))
    mine = parts[engine.coordinates.dp]
    engine.train_step(mine, LinearLoss())
    done = passes.count("forward"), passes.count("backward")
    scored = engine.forward(mine)
    return done, read_out(where, rank, engine.gradients()), None if scored is None else scored["log_probs"].to_list()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("light", [[(1, 1)] * 4, [(1, 1)]])
@pytest.mark.parametrize(("pp", "vpp", "passes"), [(1, 1, 4), (2, 1, 4), (2, 2, 8)])
def test_every_replica_runs_as_many_micro_batches_as_the_busiest(light, packing, pp, vpp, passes):
    """Four rows of 8 tokens under a limit of 8 are four; the replica with little fills up with passes of weight 0."""
    lengths = [[(3, 5)] * 4, light]
    results = run_ranks(2 * pp, _unlike, lengths, packing, pp, vpp, timeout=30)
    assert [done for done, _, _ in results] == [(passes, passes)] * (2 * pp)
    (one,) = run_ranks(1, _unlike, lengths, False, 1, 1)
    where = MegatronLayout(tiny_spec(), ParallelLayout.build(2 * pp, pp=pp, vpp=vpp))
    exact_gradients = join(MegatronLayout(tiny_spec(), ParallelLayout.build(1)), [one[1]])
    for name, tensor in join(where, [pieces for _, pieces, _ in results], 1e-6).items():
        assert relative(tensor, exact_gradients[name]) < 1e-5, name
    scored = [row for _, _, rows in results if rows is not None for row in rows]
    assert [len(row) for row in scored] == [r for _, r in lengths[0] + lengths[1]]
    for ours, theirs in zip(scored, one[2], strict=True):  # and come back in the order of the rows
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pp", [2, 3])
def test_the_interleaved_schedule_gets_a_count_that_pp_divides(pp):
    spec, layout = tiny_spec(num_layers=2 * pp), ParallelLayout.build(pp, pp=pp, vpp=2)

    def counts(rank):
        engine, _ = make_engine(spec, layout, trainable=False, micro=1)
        return [len(engine._batcher(example_batch().reorder(range(rows)))) for rows in (1, 2, 3, 4, 5)]

    assert run_ranks(pp, counts) == [[-(-rows // pp) * pp for rows in (1, 2, 3, 4, 5)]] * pp
