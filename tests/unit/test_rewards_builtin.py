"""The built-in rewards with exact values, the number grammar, and answers that try to be run."""

import ast
import json
import resource
import time
from fractions import Fraction
from pathlib import Path

import pytest

import rlhf_megatron.rewards as rewards
from rlhf_megatron.config.load import load_config
from rlhf_megatron.rewards import get_reward
from rlhf_megatron.rewards.gsm8k import final_answer, has_format
from rlhf_megatron.rewards.numbers import last_number, parse_number

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train.jsonl"


def test_sums():
    responses = ["8", "3 + 5 = 8.", "9", "no idea", "", "8 or 9", "3-8", "8.0", "The answer is 08"]
    lengths = [1, 16, 1, 4, 1, 4, 40, 3, 64]
    scores = get_reward("sums")([""] * 9, responses, [{"answer": 8}] * 9, lengths=lengths)
    expected = [0.5 + 0.5 * 31 / 32, 0.75, 0.1, 0.0, 0.0, 0.1, 0.5, 0.5 + 0.5 * 29 / 32, 0.5]
    assert [s["reward"] for s in scores] == pytest.approx(expected)
    assert [s["correct"] for s in scores] == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert get_reward("sums")([""], ["8"], [{"answer": "8"}], lengths=[8], max_tokens=16)[0]["reward"] == 0.75
    with pytest.raises(ValueError, match="'answer' is 'eight'"):
        get_reward("sums")([""], ["8"], [{"answer": "eight"}], lengths=[1])


def test_copy_gives_partial_credit():
    copy = get_reward("copy")
    responses = ["a" * 12, "a" * 6, "a" * 6 + "b" * 6, "b" * 12, "", "a" * 20, "\ufffda\ufffd"]
    expected = [1, 0.5, 0.5, 0, 0, 1, 1 / 12]
    assert copy(["aaa:"] * 7, responses, [{}] * 7) == pytest.approx(expected)
    assert copy(["bbb:"], ["bb"], [{}], length=4) == [0.5]
    for prompt in ("abc:", "aaa", ":", ""):
        with pytest.raises(ValueError, match="prompt"):
            copy([prompt], ["a"], [{}])
    with pytest.raises(ValueError, match="length is 0"):
        copy(["aaa:"], ["a"], [{}], length=0)


def test_class_takes_names_and_examples():
    prompts = ["abc:", "lower:", "QX:", "upper:", "07:", "digit:", "x:"]
    responses = ["abcdefghijkl", "abcABC", "ABCdef", "A", "0123456789ab", "\u0663" * 12, "\xe9" * 12]
    expected = [1, 0.25, 0.25, 1 / 12, 10 / 12, 0, 0]
    assert get_reward("class")(prompts, responses, [{}] * 7) == pytest.approx(expected)
    with pytest.raises(ValueError, match="neither names nor shows"):
        get_reward("class")(["a1:"], ["a"], [{}])


def test_format_length():
    function = get_reward("format_length")
    scores = function([""] * 4, ["<a>yes</a>", "<a></a>", "yes", " <a>x</a> "], [{}] * 4, lengths=[4, 4, 4, 2],
                      starts="<a>", ends="</a>", target_tokens=4)
    assert [s["reward"] for s in scores] == [1.0, 0.0, 0.0, 0.75]
    assert scores[3] == {"reward": 0.75, "format": 1.0, "closeness": 0.5}


@pytest.mark.parametrize(("response", "form", "correct"), [
    ("so 6 * 7 = 42\n#### 42", 1, 1), ("#### 42.0", 1, 1), ("#### $42", 1, 1), ("####42", 1, 1),
    ("#### 42\n  \n", 1, 1),
    ("#### 41", 1, 0), ("the answer is 42", 0, 0), ("#### forty-two", 0, 0), ("#### 42\nQuestion: next", 0, 1),
    ("#### 42\n#### 41", 1, 0), ("", 0, 0), ("####", 0, 0), ("#### 42 apples", 0, 0), ("x #### 42", 0, 1),
])
def test_gsm8k(response, form, correct):
    score = get_reward("gsm8k")([""], [response], [{"answer": "6 * 7 = <<6*7=42>>42\n#### 42"}])[0]
    assert score == {"reward": 0.5 * form + 0.5 * correct, "format": form, "correct": correct}


def test_gsm8k_knows_every_answer_of_its_rows():
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    scores = get_reward("gsm8k")([""] * 200, [row["answer"] for row in rows], rows)
    assert len(rows) == 200 and all(s["reward"] == 1.0 for s in scores)
    assert get_reward("gsm8k")([""], ["#### 1,234"], [{"answer": 1234}], format_weight=0.2)[0]["reward"] == 1.0
    with pytest.raises(ValueError, match="'answer' ends with 'none'"):
        get_reward("gsm8k")([""], [""], [{"answer": "none"}])


def test_the_shots_of_the_gsm8k_config_show_the_format_they_ask_for():
    shots = load_config(str(GSM8K.parents[3] / "yaml_configs" / "smollm2_135m_gsm8k_grpo_cpu.yaml")).data.shots
    assert [has_format(text) for text in shots] == [False, True, False, True]
    assert [final_answer(text) for text in shots[1::2]] == ["12", "13"]


@pytest.mark.parametrize(("text", "value"), [
    ("72", 72), ("-3", -3), ("\u22123", -3), ("+4", 4), ("1,234,567.50", Fraction("1234567.5")), (".5", Fraction(1, 2)),
    ("$1,000", 1000), ("-$5", -5), ("$-5", -5), ("50%", Fraction(1, 2)), (r"50\%", Fraction(1, 2)),
    ("1/2", Fraction(1, 2)),
    (r"-\frac{3}{4}", Fraction(-3, 4)), (r"\boxed{7}", 7), (r"$\boxed{(7)}$", 7), ("**7**.", 7), ("1e3", 1000),
    ("2.5E-1", Fraction(1, 4)), ("(((7)))", 7), ("007", 7),
    ("", None), ("-", None), ("--3", None), ("-$-5", None), ("1,23", None), ("12,3456", None), ("1 2", None),
    ("1/0", None), (r"\frac{1}{0}", None),
    ("1/2/3", None), ("1e999", None), ("\u0663", None), ("\u00b2", None), ("0x10", None),
    ("nan", None), ("inf", None), ("1_000", None), ("((((((7))))))", None), ("9" * 65, None), ("2+2", None),
    ("$", None), ("()", None), ("7" + "\u0000", None),
])
def test_number_grammar(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("3 + 5 = 8", 8), ("it is -8", -8), ("3-8", 8), ("1,234.", 1234), ("none", None), ("4, 5, 6", 6), ("1,2,3", 3),
    ("12,3456", 3456), ("9" * 5000, None), ("7 " + "x" * 5000, None),
])
def test_last_number(text, value):
    assert last_number(text) == value


# ---- text of a model is never run ----


def attacks(marker: Path) -> list[str]:
    return [
        f"open({str(marker)!r}, 'w').write('x')",
        f"__import__('os').system('touch {marker}')",
        f"$(touch {marker})",
        f"\\pi(open({str(marker)!r}, 'w'))",
        "__import__('math').pi",
        "9**9**9**9",
        "1e999999999",
        "(" * 100_000 + "42" + ")" * 100_000,
        "{" * 100_000,
        "\\frac{" * 50_000 + "1",
        "9" * 1_000_000,
        "1," * 500_000,
        " " * 1_000_000 + "x",
        "- " * 500_000,
        "{0.__class__.__mro__}", "%s%s%s%n", "{row[answer]}", "f'{42}'",
        "4\x002", "\ud800", "lambda: 42", "42 if True else 0", "42;import os", "[42][0]", "int('42')",
    ]


def test_hostile_answers_score_nothing_quickly_and_leave_nothing(tmp_path):
    marker = tmp_path / "marker"
    row = {"answer": "#### 42"}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for attack in attacks(marker):
        for response in (f"#### {attack}", f"thinking\n#### {attack}\n"):
            start = time.monotonic()
            assert get_reward("gsm8k")([""], [response], [row])[0] == {"reward": 0.0, "format": 0.0, "correct": 0.0}
            (get_reward("sums")([""], [response], [{"answer": 43}], lengths=[9]))
            get_reward("copy")(["aaa:"], [response], [row])
            get_reward("format_length")([""], [response], [row], lengths=[9])
            assert time.monotonic() - start < 2.0, attack[:40]
            assert get_reward("gsm8k")([""], ["#### 42"], [row])[0]["reward"] == 1.0
    assert not marker.exists() and list(tmp_path.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_reward_code_evaluates_and_unpickles_nothing():
    forbidden = {"eval", "exec", "compile", "__import__", "literal_eval", "loads", "system", "popen", "Popen"}
    dangerous = {"pickle", "subprocess", "sympy", "dill", "marshal", "shelve"}
    for path in Path(rewards.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                owner = getattr(getattr(node.func, "value", None), "id", "")
                assert name not in forbidden or owner == "re", f"{path.name}:{node.lineno} calls {name}"
                assert not any(k.arg == "shell" for k in node.keywords), f"{path.name}:{node.lineno} uses shell="
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                for module in modules:
                    assert module.split(".")[0] not in dangerous, f"{path.name} imports {module}"
