"""Plans: exactly-once coverage, bytes, source choice, rounds; carried out for all ranks in this process."""

from __future__ import annotations

import time

import pytest
import torch

from model_cases import canonical_weights, empty_like, scatter, spec
from rlhf_megatron.layouts import Box, HFLayout, Layout, MegatronLayout, ModelSpec, ParallelLayout, Placement, make_plan
from rlhf_megatron.layouts.boxes import intersect, is_contiguous, subtract
from rlhf_megatron.layouts.plan import PlanError
from rlhf_megatron.reshard import ReshardError, execute_local


class Custom(Layout):
    """{rank: [(tensor, start, stop, local)]}; each local tensor is exactly its one box unless shapes say otherwise."""

    def __init__(self, shapes, holdings, local_shapes=None):
        self.shapes, self.holdings, self.given = shapes, holdings, local_shapes or {}
        self.made = {rank: tuple(Placement(Box(t, a, b), local, (0,) * len(a)) for t, a, b, local in held)
                     for rank, held in holdings.items()}

    ranks = property(lambda self: tuple(self.holdings))

    def canonical_shapes(self):
        return self.shapes

    def placements(self, rank):
        return self.made[rank]

    def local_shapes(self, rank):
        return {p.local: self.given.get(p.local, p.box.size) for p in self.made[rank]}


def test_box_arithmetic():
    assert intersect((0, 0), (4, 4), (2, 3), (9, 9)) == ((2, 3), (4, 4))
    assert intersect((0,), (4,), (4,), (9,)) is None
    rest = subtract((0, 0), (4, 4), (1, 1), (2, 3))
    grid = torch.zeros(4, 4)
    for low, high in [*rest, ((1, 1), (2, 3))]:
        grid[low[0]:high[0], low[1]:high[1]] += 1
    assert torch.equal(grid, torch.ones(4, 4))
    assert is_contiguous((2, 8), (4, 8)) and not is_contiguous((2, 4), (4, 8)) and is_contiguous((1, 4), (4, 8))


PAIRS = [((1, 1, 1), (2, 2, 1)), ((2, 2, 1), (1, 1, 4)), ((2, 2, 1), (2, 1, 2)), ((4, 1, 1), (1, 4, 1)),
         ((1, 4, 1), (4, 1, 1)), ((2, 1, 2), (4, 1, 1)), ((2, 4, 1), (4, 2, 1)), ((4, 1, 2), (2, 2, 2))]


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", False)])
@pytest.mark.parametrize("source_degrees, target_degrees", PAIRS)
def test_any_layout_to_any_other_is_bit_equal(family, tied, source_degrees, target_degrees):
    model = spec(family, tie_word_embeddings=tied)
    weights = canonical_weights(model)
    source = MegatronLayout(model, ParallelLayout(*source_degrees[:2], dp=source_degrees[2]))
    target = MegatronLayout(model, ParallelLayout(*target_degrees[:2], dp=target_degrees[2]), norm_names="te")
    for interleave, round_bytes in ((True, 1 << 20), (False, 700)):
        plan = make_plan(source, target, round_bytes=round_bytes, interleave=interleave)
        made = {rank: empty_like(target, rank) for rank in target.ranks}
        execute_local(plan, scatter(source, weights), made)
        expected = scatter(target, weights)
        for rank in target.ranks:
            _equal_but_padding(target, rank, made[rank], expected[rank])
        assert plan.num_rounds == 1 or interleave is False


def _equal_but_padding(layout, rank, found, expected):
    for name, tensor in expected.items():
        untouched = int(found[name].isnan().sum())
        assert untouched == layout.padding(rank).get(name, 0), name
        assert torch.equal(found[name].nan_to_num(0.0), tensor), name


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_of_eleven_rows_survives_the_round_trip(tp, tied):
    model = spec(vocab_size=11, tie_word_embeddings=tied)
    weights = canonical_weights(model)
    megatron, files = MegatronLayout(model, ParallelLayout(tp=tp)), HFLayout(model, 1)
    assert megatron.local_shapes(0)["embedding.word_embeddings.weight"] == (12 // tp, 16)
    local = {rank: empty_like(megatron, rank) for rank in megatron.ranks}
    execute_local(make_plan(files, megatron), {0: weights}, local)
    # what stands in the padded row must not matter to the way back
    local[tp - 1]["embedding.word_embeddings.weight"][-1] = 50.0
    back = {0: empty_like(files, 0)}
    execute_local(make_plan(megatron, files), local, back)
    assert back[0].keys() == weights.keys()
    assert back[0]["model.embed_tokens.weight"].shape == (11, 16)
    assert all(torch.equal(back[0][name], weights[name]) for name in weights)


def test_value_head_layout_round_trip():
    model = spec(tie_word_embeddings=True)
    weights = canonical_weights(model, "value")
    assert weights["score.weight"].shape == (1, 16) and "lm_head.weight" not in weights
    source = HFLayout(model, 2, "value")
    target = MegatronLayout(model, ParallelLayout(tp=2, pp=2), "value")
    made = {rank: empty_like(target, rank) for rank in target.ranks}
    execute_local(make_plan(source, target), {0: weights, 1: weights}, made)
    for rank in target.parallel.groups("tp")[1]:
        assert torch.equal(made[rank]["output_layer.weight"], weights["score.weight"])


def test_missing_extra_and_doubled_are_named():
    shapes = {"a": (4,), "b": (4,)}
    whole = Custom(shapes, {0: [("a", (0,), (4,), "a"), ("b", (0,), (4,), "b")]})
    with pytest.raises(PlanError, match=r"missing.*b\[2:4\] \(wanted by rank 0\)"):
        make_plan(Custom(shapes, {0: [("a", (0,), (4,), "a"), ("b", (0,), (2,), "b")]}), whole)
    with pytest.raises(PlanError, match="missing in the source: c"):
        make_plan(whole, Custom({**shapes, "c": (1,)}, {0: [("c", (0,), (1,), "c")]}))
    with pytest.raises(PlanError, match="extra in the source: b"):
        make_plan(whole, Custom({"a": (4,)}, {0: [("a", (0,), (4,), "a")]}))
    with pytest.raises(PlanError, match="no rank of the target places .missing.: b"):
        make_plan(whole, Custom(shapes, {0: [("a", (0,), (4,), "a")]}))
    with pytest.raises(PlanError, match="of another shape: b"):
        make_plan(whole, Custom({"a": (4,), "b": (5,)}, {0: [("b", (0,), (5,), "b")]}))
    with pytest.raises(PlanError, match=r"holds b\[0:4\] twice .doubled."):
        make_plan(Custom(shapes, {0: [("a", (0,), (4,), "a"), ("b", (0,), (4,), "b"), ("b", (0,), (4,), "x")]}), whole)
    twice = Custom(shapes, {0: [("a", (0,), (4,), "a"), ("b", (0,), (4,), "a")]})
    with pytest.raises(PlanError, match="target, rank 0: a: some elements are placed twice"):
        make_plan(whole, twice)
    hole = Custom(shapes, {0: [("a", (0,), (4,), "a"), ("b", (0,), (4,), "b")]}, {"b": (6,)})
    with pytest.raises(PlanError, match="b: 4 of 6 elements have a box"):
        make_plan(whole, hole)


def test_overlapping_holders_give_every_element_once_and_prefer_the_own_rank():
    shapes = {"a": (8, 2)}
    source = Custom(shapes, {0: [("a", (0, 0), (6, 2), "lo")], 1: [("a", (3, 0), (8, 2), "hi")],
                             2: [("a", (0, 0), (8, 2), "all")]})
    target = Custom(shapes, {rank: [("a", (0, 0), (8, 2), "a")] for rank in range(4)})
    plan = make_plan(source, target)
    value = torch.arange(16.0).view(8, 2)
    targets = {rank: {"a": torch.full((8, 2), float("nan"))} for rank in range(4)}
    execute_local(plan, {0: {"lo": value[:6]}, 1: {"hi": value[3:]}, 2: {"all": value}}, targets)
    assert all(torch.equal(targets[rank]["a"], value) for rank in range(4))
    assert [plan.for_rank(rank).elements_received for rank in range(4)] == [4, 6, 0, 16]


def test_bytes_are_told_before_anything_runs():
    model = spec()
    size = sum(t.numel() for t in canonical_weights(model).values())
    same = make_plan(*[MegatronLayout(model, ParallelLayout(tp=2, pp=2))] * 2, itemsize=2)
    assert same.bytes_moved == same.bytes_permuted == 0 and same.bytes_shared > size * 2  # norms are held twice
    plan = make_plan(MegatronLayout(model, ParallelLayout(tp=2, pp=2)), HFLayout(model, 4), itemsize=2)
    received = [plan.for_rank(rank).elements_received for rank in range(4)]
    sent = [plan.for_rank(rank).elements_sent for rank in range(4)]
    assert plan.bytes_moved == 2 * sum(received) == 2 * sum(sent)
    assert plan.bytes_moved + plan.bytes_permuted + plan.bytes_shared == 4 * size * 2
    assert f"moved {plan.bytes_moved / 1e6:,.1f} MB" in str(plan)
    assert "TP2 PP2" in str(plan)


def test_receivers_spread_over_the_replicas_of_a_shard():
    model = ModelSpec("llama", 8, 256, 512, 8, 8, 32, 1024, 128)
    source = MegatronLayout(model, ParallelLayout(tp=2, pp=2, dp=8))
    plan = make_plan(source, HFLayout(model, 32))
    sent = [plan.for_rank(rank).elements_sent for rank in range(32)]
    assert max(sent) <= 1.2 * sum(sent) / len(sent)


def test_each_round_stays_in_its_budget_and_draws_on_both_stages():
    model = ModelSpec("llama", 4, 64, 128, 4, 4, 16, 64, 128)
    source = MegatronLayout(model, ParallelLayout(tp=2, pp=2))
    plan = make_plan(source, HFLayout(model, 4), itemsize=4, round_bytes=100_000)
    assert plan.num_rounds > 4
    rounds = plan.for_rank(0).rounds
    for now in rounds:
        assert 4 * sum(p.elements for pieces in now.receives.values() for p in pieces) <= 100_000
    peers = [set(now.receives) for now in rounds]
    assert sum({2, 3} & found != set() and 1 in found for found in peers) > len(peers) / 2


def test_tensors_that_do_not_fit_are_named():
    model = spec()
    source, target = MegatronLayout(model, ParallelLayout(tp=2)), HFLayout(model, 1)
    plan, weights = make_plan(source, target), canonical_weights(model)
    local = scatter(source, weights)
    local[0]["layers.0.self_attention.linear_xyz.weight"] = torch.zeros(2)
    with pytest.raises(ReshardError, match="unknown to the layout layers.0.self_attention.linear_xyz.weight"):
        execute_local(plan, local, {0: empty_like(target, 0)})
    local = scatter(source, weights)
    del local[1]["decoder.layers.2.mlp.linear_fc2.weight"]
    with pytest.raises(ReshardError, match="missing tensors decoder.layers.2.mlp.linear_fc2.weight"):
        execute_local(plan, local, {0: empty_like(target, 0)})
    bad = empty_like(target, 0)
    bad["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ReshardError, match=r"wrong shape model.norm.weight is \(3,\), not \(16,\)"):
        execute_local(plan, scatter(source, weights), {0: bad})


def test_a_large_cluster_is_planned_in_milliseconds_per_rank():
    model = ModelSpec("llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
    source = MegatronLayout(model, ParallelLayout(tp=8, pp=4, dp=4))
    target = MegatronLayout(model, ParallelLayout(tp=8, dp=16))
    started = time.process_time()
    plan = make_plan(source, target, itemsize=2)
    assert time.process_time() - started < 5
    started = time.process_time()
    plan.for_rank(77)
    assert time.process_time() - started < 0.5  # some 35 ms; the bound leaves room for a busy machine
    assert plan.bytes_moved > 0
