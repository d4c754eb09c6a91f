"""The same calls over every transport: rows split and restored, pools as worlds, overlap, clean ends."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from rlhf_megatron.controller.pools import JobEnvironment, LaunchError
from rlhf_megatron.controller.transports import transport
from rlhf_megatron.data.proto import DataProto, MissingField, Ragged
from rlhf_megatron.observe.metrics import Mean
from toy_job import Toy, batch, config, launch, sums_of


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {}])
def test_rows_are_split_over_replicas_and_come_back_in_order(layout):
    replicas = 4 // (layout.get("tp", 1) * layout.get("pp", 1))

    def loop(groups):
        toy = groups["toy"]
        for lengths in ([3, 9, 1, 4, 4, 2, 7], [5, 2, 8, 1], [6]):
            data = batch(lengths)
            out, metrics = toy.sums(data, extra=1)
            assert out["sums"].tolist() == [value + 1 for value in sums_of(data)]
            assert out["tag"] == [f"{i}@main" for i in range(len(lengths))]
            assert out.names() == ["sums", "tag"] and out.meta == {}
            used = min(replicas, len(lengths))
            assert metrics["toy/rows"].merge(Mean(0, 0)) == Mean(len(lengths), used)  # padding rows are not counted
            assert metrics["toy/max"].value == max(sums_of(data))
        with pytest.raises(MissingField, match="toy.sums"):
            toy.sums(DataProto(non_tensors={"row_id": [1]}))
        with pytest.raises(ValueError, match="0 rows"):
            toy.sums(batch([1]).reorder([]))
        with pytest.raises(AttributeError, match="nothing.*echo"):
            toy.nothing()
        with pytest.raises(TypeError, match="keyword"):
            toy.start("echo", batch([1]))

    outcome = launch(4, config(**layout), loop)
    assert set(outcome.codes.values()) == {0}, outcome.output


def test_padding_rows_have_no_valid_token():
    cfg = config()
    cfg.print_masks = True

    def loop(groups):
        data = batch([2]).union(DataProto({"response_mask": Ragged.from_list([[True, True, True]])}))
        assert groups["toy"].valid(data) == {"toy/valid": Mean(3.0, 1.0)}

    outcome = launch(2, cfg, loop)
    assert set(outcome.codes.values()) == {0} and "valid tokens here: 0\n" in outcome.output, outcome.output


def test_pools_are_worlds_and_disjoint_pools_work_at_the_same_time():
    def loop(groups):
        toy, other = groups["toy"], groups["other"]
        assert toy.place() == {"world": 1, "rank": 0, "pool": "a", "job_rank": 0, "env": ["0", "1", "0"]}
        assert other.place() == {"world": 2, "rank": 0, "pool": "b", "job_rank": 1, "env": ["0", "2", "1"]}
        first, second = toy.start("nap", seconds=0.6), other.start("nap", seconds=0.6)
        assert not first.done()
        (start_a, end_a), (start_b, end_b) = first.result(), second.result()
        assert max(start_a, start_b) < min(end_a, end_b), "the two calls did not overlap"
        assert first.result() is first.result() and first.done()
        # calls to one pool run in order
        a, b = toy.start("nap", seconds=0.1), toy.start("nap", seconds=0.1)
        assert b.result()[0] >= a.result()[1]
        return 7

    outcome = launch(3, config({"a": 1, "b": 0}), loop, roles=("toy", "other"))
    assert outcome.codes == {0: 7, 1: 7, 2: 7}, outcome.output


def test_large_values_and_waiting_costs_no_cpu():
    def loop(groups):
        big = {"x": torch.arange(2_000_000, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
        back = groups["toy"].echo(value=big)
        assert torch.equal(back["x"], big["x"]) and torch.equal(back["b"], big["b"])
        before = time.process_time()
        groups["toy"].nap(seconds=1.0)
        assert time.process_time() - before < 0.3

    assert set(launch(2, config(), loop).codes.values()) == {0}


def test_generation_replicas_are_consecutive_groups():
    def loop(groups):
        assert groups["toy"].count(batch([1, 2, 3, 4]))["toy/rows"] == Mean(4, 2)

    assert set(launch(4, config(generation_tp=2), loop).codes.values()) == {0}


def test_output_of_other_ranks_goes_to_their_log(tmp_path):
    cfg = config()
    cfg.print_masks = True

    def loop(groups):
        data = batch([2, 2]).union(DataProto({"response_mask": Ragged.from_list([[True], [True]])}))
        groups["toy"].valid(data)
        print("from the loop", flush=True)

    outcome = launch(2, cfg, loop, log_folder=tmp_path)
    assert set(outcome.codes.values()) == {0} and "from the loop" in outcome.output
    assert "valid tokens" not in outcome.output and not (tmp_path / "errors").exists()
    assert "valid tokens here: 1" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_a_long_wait_is_reported_with_places():
    def loop(groups):
        groups["toy"].nap(seconds=2.8)

    outcome = launch(2, config(call_timeout=3.0), loop)
    assert set(outcome.codes.values()) == {0}
    assert "still waiting for" in outcome.output and "toy_job.py" in outcome.output and " nap" in outcome.output


def test_the_loop_listens_on_the_address_of_its_host():
    def several_hosts(rank):  # as far as the processes can tell
        os.environ.update(MASTER_ADDR="127.0.0.2", LOCAL_WORLD_SIZE="1")

    assert JobEnvironment(0, 2, 1, "127.0.0.2", 1, False, 0).listen_address() == "127.0.0.2"
    outcome = launch(2, config(), lambda groups: groups["toy"].echo(value=5), before=several_hosts)
    assert outcome.codes == {0: 5, 1: 5}, outcome.output


def test_inline_is_one_process_without_threads(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "99")

    def loop(groups):
        data = batch([3, 1, 2])
        out, metrics = groups["toy"].sums(data, extra=2)
        assert out["sums"].tolist() == [value + 2 for value in sums_of(data)] and metrics["toy/rows"] == Mean(3, 1)
        assert groups["other"].place() == {"world": 1, "rank": 0, "pool": "a", "job_rank": 0, "env": ["0", "1", "0"]}
        future = groups["toy"].start("echo", value=[1])
        assert future.done() and future.result() == [1]
        return 4

    assert transport("inline").run(config({"a": 1, "b": 0}), {"toy": Toy, "other": Toy}, loop) == 4
    assert not dist.is_initialized() and os.environ["RANK"] == "7"


def test_inline_errors_pass_through_and_are_kept(tmp_path):
    with pytest.raises(ValueError, match="boom 42"):
        transport("inline").run(config(), {"toy": Toy}, lambda g: g["toy"].fail(how="raise", rank=0), tmp_path)
    (kept,) = (tmp_path / "errors").iterdir()
    assert "boom 42" in kept.read_text() and not dist.is_initialized()
    with pytest.raises(LaunchError, match="wants 4 ranks"):
        transport("inline").run(config({"main": 4}), {"toy": Toy}, lambda g: 0)
    with pytest.raises(ValueError, match="inline, torchrun"):
        transport("carrier-pigeon")
