"""`score`: what reward functions get, what they may give back, and how failures are named."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_megatron.data.proto import DataProto, MissingField, Ragged
from rlhf_megatron.rewards import RewardError, get_reward, names, register, score
from toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()


def batch_of(prompts, responses, rows=None) -> DataProto:
    def ids(texts):
        return Ragged.from_list([TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts])

    non_tensors = {"row": rows or [{} for _ in prompts], "finish_reason": ["stop"] * len(prompts)}
    return DataProto({"prompts": ids(prompts), "responses": ids(responses)}, non_tensors)


def run(function, responses=("ab", "c", "xyz"), prompts=None, rows=None, **arguments) -> DataProto:
    prompts = prompts or [f"p{i}" for i in range(len(responses))]
    return score(SimpleNamespace(function=function, arguments=arguments), batch_of(prompts, responses, rows), TOKENIZER)


def totals(scored: DataProto) -> list[float]:
    return [float(row.sum()) for row in scored["token_level_scores"]]


# Functions named as "module:function", as a user's would be. The test's own module is importable by its name.
ME = __name__


def by_length(prompts, responses, rows):
    return [float(len(r)) for r in responses]


def with_everything(prompts, responses, rows, lengths, finish_reasons, scale=1.0):
    assert finish_reasons == ["stop"] * 3
    for row in rows:
        row["answer"] = "changed"
    return [{"reward": scale * n, "prompt_length": len(p)} for n, p in zip(lengths, prompts)]


def fails_on_c(prompts, responses, rows):
    if "c" in responses:
        raise KeyError("no such thing")
    return [0.0] * len(responses)


def fails_together(prompts, responses, rows):
    if len(responses) > 1:
        raise ValueError("too many")
    return [0.0]


def gives(what):
    return lambda prompts, responses, rows: what


def test_the_reward_stands_on_the_last_token():
    scored = run(f"{ME}:by_length")
    assert scored["token_level_scores"].to_list() == [[0.0, 2.0], [1.0], [0.0, 0.0, 3.0]]
    assert scored["token_level_scores"].values.dtype == torch.float32
    assert scored["reward_components"] == [{}, {}, {}]


def test_a_response_without_tokens_has_no_place_for_a_reward():
    scored = run(f"{ME}:by_length", responses=("ab", "", "x"))
    assert scored["token_level_scores"].to_list() == [[0.0, 2.0], [], [1.0]]


def test_arguments_lengths_finish_reasons_and_components():
    rows = [{"answer": i} for i in range(3)]
    scored = run(f"{ME}:with_everything", rows=rows, scale=0.5)
    assert totals(scored) == [1.0, 0.5, 1.5]
    assert scored["reward_components"] == [{"prompt_length": 2.0}] * 3
    assert rows == [{"answer": i} for i in range(3)]  # a function cannot change the data set


def test_control_tokens_are_not_in_the_texts():
    batch = DataProto({"prompts": Ragged.from_list([[1, *TOKENIZER("hi", add_special_tokens=False)["input_ids"]]]),
                       "responses": Ragged.from_list([[*TOKENIZER("ok", add_special_tokens=False)["input_ids"], 2]])})
    seen = []

    @register("spy")
    def spy(prompts, responses, rows):
        seen.extend([prompts, responses, rows])
        return [1]

    scored = score(SimpleNamespace(function="spy", arguments={}), batch, TOKENIZER)
    assert seen == [["hi"], ["ok"], [{}]]
    assert scored["token_level_scores"].to_list() == [[0.0, 0.0, 1.0]]  # on the end token


def test_tensor_and_array_results():
    register("as_tensor")(gives(torch.tensor([1.0, 2.0, 3.0])))
    register("as_scalars")(gives([torch.tensor(1.0), True, 2]))
    assert totals(run("as_tensor")) == [1.0, 2.0, 3.0]
    assert totals(run("as_scalars")) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(("result", "said"), [
    ([1.0, None, 0.0], "row 1: reward is None"), ([1.0, 2.0, float("nan")], "row 2: reward is nan"),
    ([float("inf"), 0, 0], "row 0: reward is inf"), ([0, "1.0", 0], "row 1: reward is '1.0'"),
    ([10**400, 0, 0], "row 0"),
    ([{"reward": 1, "mean": 1}, 0, 0], r"components \['mean'\]"),
    ([0.0, 1.0], "2 rewards for 3 rows"), (1.0, "gives float"), (None, "gives NoneType"), ("abc", "gives str"),
    ([0, {"score": 1}, 0], r"row 1: the dict has no 'reward', only \['score'\]"), ([[1.0], 0, 0], "row 0: reward is"),
    ([{"reward": 1, "a": None}, 0, 0], "row 0: a is None"), (torch.zeros(3, 2), "row 0"),
])
def test_unusable_results_are_named(result, said, request):
    name = "result_" + request.node.name
    register(name)(gives(result))
    with pytest.raises(RewardError, match=said) as caught:
        run(name)
    assert repr(name) in str(caught.value)


def test_an_exception_is_named_with_function_and_row():
    with pytest.raises(RewardError, match=rf"'{ME}:fails_on_c' fails on row 1: KeyError: 'no such thing'"):
        run(f"{ME}:fails_on_c")
    with pytest.raises(RewardError, match=r"fails on the batch of 3 rows \(no row alone fails\): ValueError: too many"):
        run(f"{ME}:fails_together")


def test_arguments_are_checked_before_the_call():
    with pytest.raises(RewardError, match="does not take.*weight"):
        run(f"{ME}:by_length", weight=2)
    with pytest.raises(RewardError, match=r"\['lengths'\] are given by the system"):
        run("sums", lengths=[1])


def test_missing_fields_name_the_stage():
    prompts_only = DataProto({"prompts": Ragged.from_list([[1]])})
    with pytest.raises(MissingField, match="reward needs field.*responses"):
        score(SimpleNamespace(function="copy", arguments={}), prompts_only, TOKENIZER)


def test_names_and_wrong_names(tmp_path, monkeypatch):
    assert {"sums", "gsm8k", "format_length", "copy", "class"} <= set(names())
    assert get_reward(f"{ME}:by_length") is by_length
    with pytest.raises(RewardError, match="did you mean 'gsm8k'"):
        get_reward("gsm8")
    for path in ("../evil.py:f", "/tmp/evil.py:f", "evil.py", "os.path", "a:b:c", "a b:c", "os:system;x"):
        with pytest.raises(RewardError, match="known names are"):
            get_reward(path)
    with pytest.raises(RewardError, match="importing no_such_module_here fails.*PYTHONPATH"):
        get_reward("no_such_module_here:f")
    with pytest.raises(RewardError, match="no function 'nothing'"):
        get_reward(f"{ME}:nothing")
    with pytest.raises(RewardError, match="registered already"):
        register("copy")(by_length)
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match="broken_reward fails: ZeroDivisionError"):
        get_reward("broken_reward:f")
