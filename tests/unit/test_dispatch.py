"""Rows to replicas and back, without a process."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from rlhf_megatron.controller import dispatch
from rlhf_megatron.controller.pools import LaunchError, parse_pools
from rlhf_megatron.controller.worker_group import WorkerGroup
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.observe.metrics import Max, Mean
from rlhf_megatron.workers.actor import ActorWorker
from rlhf_megatron.workers.base import MethodSpec, RankContext, Worker, method, methods_of
from rlhf_megatron.workers.critic import CriticWorker


def batch(lengths, **fields):
    rows = [[i] * n for i, n in enumerate(lengths)]
    prompts = Ragged.from_list(rows, dtype=torch.int64)
    return DataProto({"prompts": prompts, **fields}, {"id": list(range(len(lengths)))})


SPEC = MethodSpec("m", returns=("out", "id"), split="train")


def test_counts_are_equal_within_one_and_tokens_are_balanced():
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 60))]
        replicas = rng.randint(1, 9)
        rows = dispatch.split(batch(lengths), replicas).rows
        assert sorted(i for part in rows for i in part) == list(range(len(lengths)))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert all(part == tuple(sorted(part)) for part in rows)
        # no replica is above the mean by more than the largest row
        assert max(sum(lengths[i] for i in part) for part in rows) <= sum(lengths) / replicas + max(lengths)
    # 9 and 9; cut in order it would be 15 and 3
    assert dispatch.split(batch([8, 7, 2, 1]), 2).rows == ((0, 3), (1, 2))
    with pytest.raises(ValueError, match="at least 1"):
        dispatch.split(batch([1]), 0)


def test_rows_cost_what_the_role_says():
    lengths = [9, 7, 6, 6, 5, 3]
    assert dispatch.split(batch(lengths), 2).rows == ((0, 3, 5), (1, 2, 4))  # 18 and 18 tokens; squares 126 and 110
    assert dispatch.split(batch(lengths), 2, (0.0, 1.0)).rows == ((0, 4, 5), (1, 2, 3))  # 17 and 19; 115 and 121
    assert dispatch.split(batch(lengths), 2, (1e6, 1.0)).rows == ((0, 3, 5), (1, 2, 4))  # the linear part is larger


class Costly(Worker):
    """Two kinds of methods; its long rows are dear."""

    asked = 0

    @classmethod
    def row_cost(cls, role, config):
        cls.asked += 1
        return (0.0, 1.0)

    @method(reads=("prompts",), split="train")
    def train(self, batch):
        return None

    @method(reads=("prompts",), split="generate")
    def generate(self, batch):
        return None


def test_a_worker_group_asks_once_and_generation_is_balanced_by_tokens():
    sent = []

    def call(pool, role, method, kwargs, rows, wanted):
        sent.append([rows[rank]["prompts"].lengths.tolist() for rank in (0, 1)])
        return SimpleNamespace(wait=lambda: dict.fromkeys(wanted))

    pool = parse_pools({"main": 2}, 2)["main"]
    group = WorkerGroup("actor", Costly, roles(), pool, SimpleNamespace(call=call))
    for name in ("train", "generate", "train"):
        getattr(group, name)(batch([9, 7, 6, 6, 5, 3]))
    dear, tokens = [[9, 5, 3], [7, 6, 6]], [[9, 6, 3], [7, 6, 5]]
    assert sent == [dear, tokens, dear] and Costly.asked == 1
    assert Worker.row_cost("actor", roles()) == (1.0, 0.0)


def test_the_cost_of_a_row_follows_the_shape_of_the_roles_model(tmp_path):
    shape = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "vocab_size": 50,
             "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    for name, layers in (("a", 2), ("b", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": layers}))
    config = SimpleNamespace(actor=SimpleNamespace(model=str(tmp_path / "a")), critic=SimpleNamespace(model=None))
    assert ActorWorker.row_cost("actor", config) == CriticWorker.row_cost("critic", config) == (3072.0, 48.0)
    config.critic.model = str(tmp_path / "b")
    assert CriticWorker.row_cost("critic", config) == (6144.0, 96.0)
    (tmp_path / "b" / "config.json").unlink()
    assert CriticWorker.row_cost("critic", config) == (6144.0, 96.0), "the file was read again"


def test_prompt_and_response_tokens_count():
    data = batch([2, 3], responses=Ragged.from_list([[1, 1, 1], [1]]))
    assert dispatch.token_counts(data) == [5, 4]
    assert dispatch.token_counts(DataProto(non_tensors={"id": [1, 2]})) == [1, 1]


def echo(part):
    return DataProto({"out": part["prompts"], "more": part["prompts"]}, {"id": part["id"]}, {"meta": id(part)})


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
def test_rows_come_back_in_order_and_padding_is_dropped(replicas):
    data = batch([4, 1, 7, 2, 2])
    split = dispatch.split(data, replicas)
    assert all(len(part) >= 1 for part in split.parts) and len(split.parts) == replicas
    results = [(echo(part), {"rows": Mean(len(part), 1), "max": Max(max(part["id"]))}) for part in split.parts]
    rows, metrics = dispatch.merge(results, split, SPEC, "toy.m")
    assert rows["out"].equal(data["prompts"]) and rows["id"] == data["id"] and set(rows.names()) == {"out", "id"}
    assert metrics == {"rows": Mean(5, min(replicas, 5)), "max": Max(4)}


def test_a_padding_row_is_the_shortest_and_has_no_weight():
    mask = Ragged.from_list([[True, True], [True], [True, True, True]])
    data = batch([4, 2, 4], response_mask=mask)
    parts = dispatch.split(data, 4).parts
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert parts[3]["id"] == [1] and parts[3]["response_mask"].to_list() == [[False]]
    assert data["response_mask"].to_list() == [[True, True], [True], [True, True, True]], "the batch was written to"
    assert not any(any(row) for part in parts[3:] for row in part["response_mask"].to_list())


def test_wrong_results_are_named():
    data = batch([1, 1, 1, 1])
    split = dispatch.split(data, 2)
    good = [echo(part) for part in split.parts]
    with pytest.raises(ValueError, match="toy.m declares that it returns 'nope'"):
        dispatch.merge(good, split, MethodSpec("m", returns=("nope",), split="train"), "toy.m")
    with pytest.raises(ValueError, match="toy.m got 2 rows and returned 1"):
        dispatch.merge([good[0], good[1].reorder([0])], split, SPEC, "toy.m")
    with pytest.raises(TypeError, match="toy.m.*different kinds"):
        dispatch.merge([good[0], {}], split, SPEC, "toy.m")
    with pytest.raises(TypeError, match="toy.m returned int"):
        dispatch.merge([1, 2], split, SPEC, "toy.m")
    with pytest.raises(ValueError, match="0 rows"):
        dispatch.split(data.reorder([]), 2)
    assert dispatch.merge([None, None], split, MethodSpec("m", split="train"), "toy.m") is None


class Declared(Worker):
    @method(reads=("prompts",), returns=("out",), split="train")
    def a(self, batch):
        return batch

    @method()
    def b(self):
        return 1


class Override(Declared):
    def a(self, batch):
        return batch


def test_declarations():
    found = methods_of(Override)
    assert sorted(found) == ["a", "b"] and found["a"].split == "train" and found["b"].split is None
    with pytest.raises(ValueError, match="tuple"):
        method(reads="prompts", split="train")
    with pytest.raises(ValueError, match="split='x'"):
        method(split="x")
    with pytest.raises(ValueError, match="need split"):
        method(reads=("a",))


def roles(tp=1, pp=1, generation_tp=1):
    return SimpleNamespace(actor=SimpleNamespace(parallel=SimpleNamespace(tp=tp, pp=pp, cp=1)),
                           generation=SimpleNamespace(tp=generation_tp))


def test_replicas_follow_the_rank_order_tp_dp_pp():
    found = Worker.replicas("actor", roles(tp=2, pp=2), 8, "train")
    assert [r.ranks for r in found] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [(r.entry, r.output) for r in found] == [(0, 4), (2, 6)]
    found = Worker.replicas("actor", roles(generation_tp=2), 4, "generate")
    assert [(r.ranks, r.entry, r.output) for r in found] == [((0, 1), 0, 0), ((2, 3), 2, 2)]
    with pytest.raises(ValueError, match=r"tp\(3\)"):
        Worker.replicas("actor", roles(tp=3), 4, "train")
    with pytest.raises(ValueError, match=r"generation.tp\(3\).*size\(4\)"):
        Worker.replicas("actor", roles(generation_tp=3), 4, "generate")
    worker = Worker("actor", roles(tp=2, pp=2), RankContext(5, 8, "main", 5, 0))
    assert worker.replica("train").ranks == (0, 1, 4, 5)


def test_pools_say_both_numbers():
    pools = parse_pools({"a": 2, "b": 0}, 6)
    assert pools["a"].ranks == (0, 1) and pools["b"].ranks == (2, 3, 4, 5)
    for sizes, job, text in [
        ({"a": 8}, 4, "needs 8 ranks but the job has 4"),
        ({"a": 2}, 4, "needs 2 ranks but the job has 4"),
        ({"a": 4, "b": 0}, 4, "needs at least 5 ranks but the job has 4"),
        ({"a": 0, "b": 0}, 4, "only one pool"),
        ({"a": -1, "b": 5}, 4, "at least 0"),
        ({}, 4, "empty"),
    ]:
        with pytest.raises(LaunchError, match=text):
            parse_pools(sizes, job)
