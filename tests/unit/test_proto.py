"""DataProto and Ragged against plain Python lists, and the files they are kept in."""

import json
import math
import random

import pytest
import torch

from rlhf_megatron.data.proto import BatchError, DataProto, MissingField, Ragged

NAN = float("nan")


def rows_of(batch: DataProto) -> list[dict]:
    """The batch as plain rows, the independent picture that operations are compared with."""
    columns = {n: v.to_list() if isinstance(v, Ragged) else list(v) if isinstance(v, list) else v.tolist()
               for n, v in batch.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def make(rows: int = 7, seed: int = 0, meta: dict | None = None) -> DataProto:
    rng = random.Random(seed)
    prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, 5))] for _ in range(rows)]
    responses = [[rng.randrange(50) for _ in range(rng.randrange(0, 6))] for _ in range(rows)]
    scores = [[rng.random() for _ in response] for response in responses]
    return DataProto(
        {
            "prompts": Ragged.from_list(prompts),
            "responses": Ragged.from_list(responses),
            "token_level_scores": Ragged.from_list(scores, dtype=torch.float32),
            "response_mask": Ragged.from_list([[True] * len(r) for r in responses], dtype=torch.bool),
            "dense": torch.arange(rows * 2).view(rows, 2),
        },
        {"sample_id": list(range(rows)), "row": [{"answer": i, "x": [None, NAN][i % 2]} for i in range(rows)]},
        {"step": 3} if meta is None else meta,
    )


def same(a: list, b: list) -> bool:
    return json.dumps(a) == json.dumps(b)  # NaN is written as NaN


# ---- Ragged ----


def test_pad_and_mask_both_sides():
    ragged = Ragged.from_list([[5, 6], [], [7, 8, 9]])
    assert ragged.pad(0).tolist() == [[5, 6, 0], [0, 0, 0], [7, 8, 9]]
    assert ragged.pad(-1, to=4, side="left").tolist() == [[-1, -1, 5, 6], [-1, -1, -1, -1], [-1, 7, 8, 9]]
    assert ragged.mask(side="left").tolist() == [[False, True, True], [False] * 3, [True] * 3]
    with pytest.raises(BatchError, match="3 tokens.*width of 2"):
        ragged.pad(0, to=2)
    with pytest.raises(BatchError, match="middle"):
        ragged.pad(0, side="middle")


def test_padded_view_goes_back_to_the_same_ragged():
    ragged = Ragged.from_list([[1.0], [NAN, 2.0], []], dtype=torch.float32)
    for side in ("left", "right"):
        assert Ragged.from_padded(ragged.pad(NAN, to=5, side=side), ragged.mask(5, side)).equal(ragged)


def test_ragged_with_trailing_dimensions():
    ragged = Ragged(torch.arange(12).view(6, 2), torch.tensor([2, 1, 3]))
    assert ragged.pad(-1).shape == (3, 3, 2)
    assert ragged.pad(-1)[1].tolist() == [[4, 5], [-1, -1], [-1, -1]]
    assert ragged.reorder(torch.tensor([2, 0])).values.tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]


def test_ragged_refuses_lengths_that_do_not_fit():
    with pytest.raises(BatchError, match="sum to 3, but there are 4"):
        Ragged(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(BatchError, match="negative"):
        Ragged(torch.zeros(4), torch.tensor([5, -1]))


def test_ragged_rows_and_iteration():
    ragged = Ragged.from_list([[1], [], [2, 3]])
    assert [row.tolist() for row in ragged] == [[1], [], [2, 3]]
    assert ragged[-1].tolist() == [2, 3] and ragged[1].tolist() == []
    with pytest.raises(IndexError):
        ragged[3]


# ---- rows ----


@pytest.mark.parametrize("seed", range(5))
def test_reorder_repeat_split_concat_equal_plain_lists(seed):
    batch, rng = make(9, seed), random.Random(seed)
    rows = rows_of(batch)
    index = [rng.randrange(9) for _ in range(14)]
    assert same(rows_of(batch.reorder(index)), [rows[i] for i in index])
    assert same(rows_of(batch.repeat(3)), [row for row in rows for _ in range(3)])
    assert same(rows_of(batch.repeat(2, interleave=False)), rows + rows)
    pieces = batch.split([4, 0, 5])
    assert same([rows_of(p) for p in pieces], [rows[:4], [], rows[4:]])
    assert DataProto.concat(pieces).equal(batch)
    assert [len(p) for p in batch.chunk(4)] == [3, 2, 2, 2]
    assert [len(p) for p in batch.chunk(11)] == [1] * 9 + [0] * 2
    assert DataProto.concat(batch.chunk(11)).equal(batch)


def test_order_and_back():
    batch = make(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert batch.reorder(order).reorder(order.argsort()).equal(batch)


def test_wrong_row_operations_name_their_numbers():
    batch = make(7)
    with pytest.raises(BatchError, match=r"\[3, 3\] sum to 6.*7 rows"):
        batch.split([3, 3])
    with pytest.raises(BatchError, match="0..7 outside the 7 rows"):
        batch.reorder([0, 7])
    with pytest.raises(BatchError, match="piece 1 and piece 0 differ in.*dense"):
        DataProto.concat([batch, batch.select([n for n in batch.names() if n != "dense"])])
    other = DataProto({**batch.tensors, "dense": batch["dense"].float()}, batch.non_tensors, batch.meta)
    with pytest.raises(BatchError, match="'dense' differs between the pieces"):
        DataProto.concat([batch, other])
    with pytest.raises(BatchError, match="disagree about the number of rows"):
        DataProto({"a": torch.zeros(2)}, {"b": [1]})


@pytest.mark.parametrize(("rows", "size", "expected"), [(8, 4, [4, 4]), (7, 3, [3, 3, 1]), (3, 10, [3]), (0, 2, [])])
def test_mini_batches_hold_every_row_once(rows, size, expected):
    batch = make(rows)
    for seed in (None, 5):
        minis = list(batch.mini_batches(size, shuffle_seed=seed))
        assert [len(m) for m in minis] == expected
        assert sorted(i for m in minis for i in m["sample_id"]) == list(range(rows))


def test_mini_batch_order_follows_the_seed_only_and_meta_is_their_own():
    batch = make(16)
    orders = [[i for m in batch.mini_batches(5, shuffle_seed=s) for i in m["sample_id"]] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    first, *_ = batch.mini_batches(8)
    first.meta["denominator"] = 1.0
    assert "denominator" not in batch.meta


def test_row_padding_has_no_weight_and_goes_away():
    batch = make(5)
    padded = batch.pad_rows(8)
    assert len(padded) == 8 and not padded["response_mask"].split([5, 3])[1].values.any()
    total = batch["prompts"].lengths + batch["responses"].lengths
    assert set((padded["prompts"].lengths + padded["responses"].lengths)[5:].tolist()) == {int(total.min())}
    assert padded.unpad().equal(batch)
    assert padded.select(["prompts"]).unpad(5).equal(batch.select(["prompts"]))
    assert batch.pad_rows(5).equal(batch)
    with pytest.raises(BatchError, match="5 rows to 4"):
        batch.pad_rows(4)
    with pytest.raises(BatchError, match="0 rows to 4"):
        make(0).pad_rows(4)


# ---- fields ----


def test_union_select_pop_rename():
    batch = make()
    left, right = batch.select(["prompts", "sample_id"]), batch.select(["responses", "sample_id"])
    assert left.union(right).names() == ["prompts", "responses", "sample_id"]
    assert DataProto(meta={"a": 1}).union(left).meta == {"a": 1, "step": 3}
    renamed = left.rename({"prompts": "questions"})
    assert "prompts" not in renamed and renamed["questions"] is batch["prompts"]
    taken = left.pop(["prompts"])
    assert taken.names() == ["prompts"] and left.names() == ["sample_id"] and len(left) == 7


def test_union_refuses_contradictions():
    batch = make()
    with pytest.raises(BatchError, match="'sample_id' with different contents"):
        batch.union(DataProto(non_tensors={"sample_id": list(range(1, 8))}))
    with pytest.raises(BatchError, match="7 rows with 3"):
        batch.union(DataProto({"x": torch.zeros(3)}))
    with pytest.raises(BatchError, match="meta 'step' differs"):
        batch.union(DataProto(meta={"step": 4}))
    with pytest.raises(BatchError, match="two fields one name"):
        batch.rename({"prompts": "responses"})


def test_a_missing_field_is_named_with_the_stage():
    batch = make()
    assert batch.require(["prompts"], "actor.update") is batch
    with pytest.raises(MissingField) as caught:
        batch.require(["prompts", "advantages"], "actor.update")
    said = str(caught.value)
    assert "actor.update needs field(s) ['advantages']" in said and "token_level_scores" in said
    with pytest.raises(MissingField, match="no field 'values'"):
        batch["values"]


# ---- equality and files ----


def test_equal_takes_nan_for_nan_and_sees_types():
    batch = make()
    values = torch.tensor([NAN, 1.0])
    lengths = torch.tensor([1, 1])
    one = DataProto({"a": Ragged(values, lengths)}, {"b": [{"x": [NAN]}, math.inf]})
    copied = Ragged(values.clone(), lengths.clone())
    assert one.equal(DataProto({"a": copied}, {"b": [{"x": [float("nan")]}, math.inf]}))
    assert not one.equal(DataProto({"a": Ragged(values.double(), lengths)}, one.non_tensors))
    assert not one.equal(DataProto(one.tensors, {"b": [{"x": [0.0]}, math.inf]}))
    assert make().equal(batch)
    assert "token_level_scores" in make(seed=1).difference(make(seed=2))


def test_save_and_load_give_the_batch_back(tmp_path):
    batch = make(meta={"step": 3, "text": "\u2028 \U0001f600 \ud800", "loss": NAN})
    folder = tmp_path / "rollouts" / "step_000001"
    batch.save(folder)
    assert DataProto.load(folder).equal(batch)
    assert sorted(p.name for p in folder.iterdir()) == ["batch.json", "batch.safetensors"]
    batch.reorder([1, 0]).save(folder)  # replaces
    assert len(DataProto.load(folder)) == 2
    assert [p.name for p in folder.parent.iterdir()] == ["step_000001"]
    make(0).save(tmp_path / "empty")
    assert DataProto.load(tmp_path / "empty").equal(make(0))
    half = batch.split([3, 4])[0]  # a view of a larger storage
    half.save(tmp_path / "half")
    assert DataProto.load(tmp_path / "half").equal(half)


def test_fields_that_share_storage_are_saved(tmp_path):
    """The fields that one stage makes have the same lengths tensor."""
    lengths, values = torch.tensor([1, 2]), torch.arange(3.0)
    batch = DataProto({"a": Ragged(values, lengths), "b": Ragged(values, lengths), "c": values.view(3, 1)[:2]})
    batch.save(tmp_path / "batch")
    assert DataProto.load(tmp_path / "batch").equal(batch)


def test_save_refuses_what_json_would_change(tmp_path):
    for value in (("a",), {1: "a"}, {"t": torch.zeros(1)}, b"x"):
        with pytest.raises(BatchError, match="field 'row' holds"):
            DataProto(non_tensors={"row": [value]}).save(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_save_does_not_replace_a_foreign_folder(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    with pytest.raises(BatchError, match="not a saved batch"):
        make().save(tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.txt").exists()


def test_load_names_missing_and_damaged_files(tmp_path):
    with pytest.raises(BatchError, match="not a saved batch"):
        DataProto.load(tmp_path / "nothing")
    make().save(tmp_path / "cut")
    data = (tmp_path / "cut" / "batch.safetensors").read_bytes()
    (tmp_path / "cut" / "batch.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BatchError, match="damaged"):
        DataProto.load(tmp_path / "cut")
    make().save(tmp_path / "other")
    document = json.loads((tmp_path / "other" / "batch.json").read_text())
    (tmp_path / "other" / "batch.json").write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(BatchError, match="format 99"):
        DataProto.load(tmp_path / "other")
