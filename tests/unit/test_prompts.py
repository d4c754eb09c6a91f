"""RLHFDataset: reading, checking, cutting, ordering and resuming."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_megatron.data.prompts import DataError, RLHFDataset
from toy_tokenizer import toy_tokenizer

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train.jsonl"
TOKENIZER = toy_tokenizer()


def settings(train, **changes):
    values = dict(train=train, prompt_key="prompt", chat=False, system=None, shots=(), max_prompt_tokens=512,
                  overlong="error", shuffle=True, drop_last=True, bad_rows="stop")
    return SimpleNamespace(**{**values, **changes})


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, columns: dict) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def dataset(path: Path, rows: int = 0, seed: int = 1, **changes) -> RLHFDataset:
    if rows:
        jsonl(path, [{"prompt": f"p{i}", "n": i} for i in range(rows)])
    return RLHFDataset(settings(str(path), **changes), TOKENIZER, seed)


def numbers(batch) -> list[int]:
    return [row["n"] for row in batch["row"]]


# ---- batches and epochs ----


def test_a_batch_over_several_epochs(tmp_path):
    data = dataset(tmp_path / "a.jsonl", rows=3)
    batch = data.next(8)
    assert len(batch) == 8 and batch["group_id"] == list(range(8))
    assert (data.state()["epoch"], data.state()["offset"]) == (2, 2)
    order = numbers(batch)
    assert sorted(order[:3]) == sorted(order[3:6]) == [0, 1, 2] and len(set(order[6:])) == 2
    assert sorted(order[6:] + numbers(data.next(1))) == [0, 1, 2]
    texts = TOKENIZER.batch_decode(batch["prompts"].to_list(), skip_special_tokens=True)
    assert texts == [f"p{n}" for n in order]


def test_fewer_rows_than_a_batch_is_an_error_with_both_numbers(tmp_path):
    data = dataset(tmp_path / "a.jsonl", rows=3)
    for ask in (lambda: data.check_batch(4), lambda: data.next(4, wrap=False)):
        with pytest.raises(DataError, match="3 usable rows.*fewer than trainer.prompts_per_step 4"):
            ask()
    data.check_batch(3)
    dataset(tmp_path / "a.jsonl", rows=3, drop_last=False).check_batch(4)


def test_the_row_count_of_the_batch_check_is_taken_after_filtering(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (3, 3, 30, 30)])
    data = dataset(path, max_prompt_tokens=10, overlong="drop")
    with pytest.raises(DataError, match=r"2 usable rows \(rows 4, kept 2, bad 0, overlong_dropped 2.*step 4"):
        data.check_batch(4)


def test_last_batch_of_an_epoch_without_drop_last(tmp_path):
    data = dataset(tmp_path / "a.jsonl", rows=5, drop_last=False)
    epochs = [[data.next(4), data.next(4)] for _ in range(2)]
    assert [[len(b) for b in epoch] for epoch in epochs] == [[4, 1], [4, 1]]
    for first, last in epochs:
        assert sorted(numbers(first) + numbers(last)) == list(range(5))
    assert len(data.next(4, wrap=True)) == len(data.next(4, wrap=True)) == 4


def test_strict_batches_with_drop_last_leave_the_remainder_out(tmp_path):
    data = dataset(tmp_path / "a.jsonl", rows=5)
    assert [len(data.next(4, wrap=False)) for _ in range(3)] == [4, 4, 4]
    assert (data.epoch, data.offset) == (2, 4)


def test_no_empty_batch_at_the_end_of_an_epoch(tmp_path):
    for drop_last in (True, False):
        data = dataset(tmp_path / "a.jsonl", rows=4, drop_last=drop_last)
        assert [len(data.next(2)) for _ in range(4)] == [2, 2, 2, 2]
        assert (data.state()["epoch"], data.state()["offset"]) == (2, 0)


def test_no_rows_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="no usable row of 0"):
        dataset(tmp_path / "a.jsonl")
    jsonl(tmp_path / "a.jsonl", [{"prompt": ""}, {"q": 1}])
    with pytest.raises(DataError, match="no usable row of 2.*bad 2.*row 1: 'prompt' is empty"):
        dataset(tmp_path / "a.jsonl", bad_rows="skip")
    with pytest.raises(DataError, match="0 prompts wanted"):
        dataset(tmp_path / "a.jsonl", rows=1).next(0)


def test_order_is_a_function_of_seed_and_epoch(tmp_path):
    path = tmp_path / "a.jsonl"
    one, two = dataset(path, rows=20, seed=5), dataset(path, seed=5)
    first = numbers(one.next(20))
    assert first == numbers(two.next(7)) + numbers(two.next(13))
    assert numbers(one.next(20)) != first != numbers(dataset(path, seed=6).next(20))
    assert numbers(dataset(path, shuffle=False).next(20)) == list(range(20))


def test_resume_is_exact(tmp_path):
    path = tmp_path / "a.jsonl"
    straight, first = dataset(path, rows=7), dataset(path)
    expected = [numbers(straight.next(4)) for _ in range(9)]
    got = [numbers(first.next(4)) for _ in range(4)]
    state = json.loads(json.dumps(first.state()))
    second = dataset(path)
    second.load_state(state)
    assert got + [numbers(second.next(4)) for _ in range(5)] == expected


def test_resume_refuses_other_prompts(tmp_path):
    path = tmp_path / "a.jsonl"
    state = dataset(path, rows=7).state()
    with pytest.raises(DataError, match="rows: saved 7, now 8"):
        dataset(path, rows=8).load_state(state)
    with pytest.raises(DataError, match="seed: saved 1, now 2"):
        dataset(path, rows=7, seed=2).load_state(state)
    with pytest.raises(DataError, match="fingerprint"):
        dataset(jsonl(path, [{"prompt": f"q{i}"} for i in range(7)])).load_state(state)
    with pytest.raises(DataError, match="offset 9 is outside"):
        dataset(path).load_state({**dataset(path).state(), "offset": 9})


# ---- overlong prompts ----


def test_overlong_prompts(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "abc"}, {"prompt": "abcdefgh"}])
    with pytest.raises(DataError, match=r"a.jsonl, row 2: the prompt has 9 tokens, above data.max_prompt_tokens 4"):
        dataset(path, max_prompt_tokens=4)
    results = {}
    for policy in ("drop", "left", "right"):
        data = dataset(path, max_prompt_tokens=4, overlong=policy, shuffle=False)
        results[policy] = TOKENIZER.batch_decode(data.prompts.to_list())
        assert data.counts["overlong_dropped" if policy == "drop" else "overlong_cut"] == 1
    assert results == {"drop": ["<s>abc"], "left": ["<s>abc", "efgh"], "right": ["<s>abc", "<s>abc"]}


# ---- rows ----


def test_nested_parquet_columns_render_as_the_original_objects(tmp_path):
    def call(arguments):
        return [{"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]},
                {"role": "user", "content": "on"}]

    originals = [call({"a": 1}), call({"b": ["x"]}), [{"role": "user", "content": "plain"}]]
    path = parquet(tmp_path / "a.parquet", {"prompt": originals, "n": [0, 1, 2]})
    data = dataset(path, chat=True, shuffle=False)
    assert [row["prompt"] for row in data.rows] == originals
    texts = TOKENIZER.batch_decode(data.prompts.to_list())
    assert texts == [TOKENIZER.apply_chat_template(o, tokenize=False, add_generation_prompt=True) for o in originals]
    assert not any("None" in text or "array(" in text for text in texts)
    same = dataset(jsonl(tmp_path / "a.jsonl", [{"prompt": o, "n": i} for i, o in enumerate(originals)]), chat=True,
                   shuffle=False)
    assert same.rows == data.rows and same.fingerprint == data.fingerprint


def test_parquet_values_become_plain_json(tmp_path):
    import datetime
    import decimal

    path = parquet(tmp_path / "a.parquet", {
        "prompt": ["x"], "when": [datetime.datetime(2024, 1, 2)], "price": [decimal.Decimal("1.50")],
        "many": [[1, None]], "none": [None], "flag": [True]})
    row = dataset(path).rows[0]
    assert row == {"prompt": "x", "when": "2024-01-02T00:00:00", "price": 1.5, "many": [1, None], "none": None,
                   "flag": True}
    with pytest.raises(DataError, match=r"b.parquet, row 1: column 'raw' holds bytes"):
        dataset(parquet(tmp_path / "b.parquet", {"prompt": ["x"], "raw": [b"\x00"]}))


BAD_LINES = [
    ('{"prompt": null}', "'prompt' is None"), ('{"prompt": ""}', "is empty"), ('{"prompt": []}', "empty list"),
    ('{"prompt": [{"role": "user", "content": null}]}', "None as content"), ('{"prompt": NaN}', "float nan"),
    ('{"text": "x"}', "no column 'prompt'"), ('{"prompt": 3}', "int 3"), ('{"prompt": "\\ud800"}', "lone surrogate"),
    ('{"prompt": "x"', "is not JSON"), ("[1]", "is list, not an object"), ("[" * 100_000, "nested too deeply|not JSON"),
    ('{"prompt": "x", "deep": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply|"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES[:-1], ids=range(len(BAD_LINES) - 1))
def test_a_bad_row_stops_or_is_counted(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"prompt": f"p{i}", "n": i}) for i in range(1000)]
    path.write_text("\n".join([*good[:500], line, *good[500:]]))
    with pytest.raises(DataError, match=f"a.jsonl, row 501: .*({said})"):
        dataset(path, chat=True)
    data = dataset(path, chat=True, bad_rows="skip")
    assert (data.counts["rows"], data.counts["kept"], data.counts["bad"]) == (1001, 1000, 1)
    assert len(data.problems) == 1 and "row 501" in data.problems[0]


def test_a_deeply_nested_extra_column_never_crashes(tmp_path):
    (tmp_path / "a.jsonl").write_text(BAD_LINES[-1][0] + '\n{"prompt": "y"}\n')
    data = dataset(tmp_path / "a.jsonl", bad_rows="skip")
    assert data.counts["kept"] + data.counts["bad"] == 2


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="row 2: is not UTF-8"):
        dataset(tmp_path / "a.jsonl")


def test_unusual_but_valid_text_is_accepted_exactly(tmp_path):
    texts = ["\U0001f600", "e\u0301", "line\u2028separator\u2029", "x" * 2**20, "tab\tnew\nline\r"]
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    columns = parquet(tmp_path / "a.parquet", {"prompt": texts})
    for path in (tmp_path / "a.jsonl", columns):
        data = dataset(path, shuffle=False, max_prompt_tokens=2**21)
        assert TOKENIZER.batch_decode(data.prompts.to_list(), skip_special_tokens=True) == texts


def test_prompts_with_control_text_are_counted(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "<s>hi"}, {"prompt": "hi"}])
    data = dataset(path, chat=True)
    assert data.counts["control_strings"] == 1
    assert [ids.count(1) for ids in data.prompts.to_list()] == [1, 1]


def test_several_files_and_wrong_files(tmp_path):
    one, two = jsonl(tmp_path / "1.jsonl", [{"prompt": "a"}]), parquet(tmp_path / "2.parquet", {"prompt": ["b", "c"]})
    data = RLHFDataset(settings((str(one), str(two)), shuffle=False), TOKENIZER, 1)
    assert [row["prompt"] for row in data.rows] == ["a", "b", "c"]
    with pytest.raises(DataError, match="does not exist"):
        dataset(tmp_path / "3.jsonl")
    (tmp_path / "4.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match="ending must be .jsonl or .parquet"):
        dataset(tmp_path / "4.csv")
    (tmp_path / "5.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not readable as parquet"):
        dataset(tmp_path / "5.parquet")


def test_the_grade_school_maths_rows(tmp_path):
    data = RLHFDataset(settings(str(GSM8K), prompt_key="question", chat=True, max_prompt_tokens=2000), TOKENIZER, 1)
    assert data.counts["kept"] == 200
    assert all("####" in row["answer"] for row in data.next(8)["row"])
