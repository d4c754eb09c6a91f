"""When a response ends, and what of it counts: by lengths and finish reason, never by comparing ids."""

import json
from types import SimpleNamespace

import pytest

from rlhf_megatron.generation.stopping import Stopper, stop_token_ids
from toy_tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def cut(token_ids: list[int], stopper: Stopper) -> tuple[list[int], str]:
    """What an engine keeps of a run of tokens that it asks the stopper about one by one, and why it ended."""
    for length in range(1, len(token_ids) + 1):
        reason = stopper(token_ids[:length])
        if reason is not None:
            return token_ids[:length], reason
    raise AssertionError("the stopper did not end the response")


@pytest.mark.parametrize(("generation", "config", "eos", "found"), [
    (2, None, None, {2}), ([2, 9], 3, None, {2, 3, 9}), (None, [4], 5, {4, 5}), (None, None, None, set()),
])
def test_every_stop_token_that_is_named_counts(tmp_path, generation, config, eos, found):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=eos)) == found
    assert stop_token_ids(tmp_path) == found - {eos}


# pad = EOS = 9: tokens, stop ids -> length and reason
@pytest.mark.parametrize(("tokens", "stop_ids", "max_tokens", "length", "reason"), [
    ([5, 6, 9, 9, 9], {9}, 5, 3, "stop"),    # the real EOS counts, what follows does not
    ([5, 6, 7, 8, 4], {9}, 5, 5, "length"),  # no EOS: truncated
    ([5, 8, 9, 9], {9, 8}, 4, 2, "stop"),    # any of several stop ids
    ([9, 9, 9], {9}, 3, 1, "stop"),          # one valid token
    ([5, 6, 9], {9}, 3, 3, "stop"),          # EOS as the last allowed token: not truncated
    ([5, 6, 7], set(), 3, 3, "length"),
])
def test_tokens_that_end_a_response(tokens, stop_ids, max_tokens, length, reason):
    assert cut(tokens, Stopper(stop_ids, (), None, max_tokens)) == (tokens[:length], reason)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(tokenizer):
    """[5, 6, 9, 9, 9] stopped after two tokens, although 9 is EOS: the length says so."""
    texts = {5: "a", 6: "END", 9: ""}
    stopper = Stopper({9}, ("END",), lambda ids: "".join(texts[i] for i in ids), 5)
    assert cut([5, 6, 9, 9, 9], stopper) == ([5, 6], "stop")


@pytest.mark.parametrize(("text", "stops", "ends"), [
    ("abc END def", ["END"], "abc END"),
    ("x" * 50 + "\n\nQ: more", ["\n\nQ:"], "x" * 50 + "\n\nQ:"),
    ("one STOP two", ["nothing", "STOP"], "one STOP"),
    ("naïve Ω end", ["Ω"], "naïve Ω"),  # two bytes, two tokens
    ("no such text", ["absent"], "no such text"),
])
def test_stop_strings_across_tokens_and_bytes(tokenizer, text, stops, ends):
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found, reason = cut(ids, Stopper({2}, stops, decode, len(ids)))
    assert decode(found) == ends and reason == ("length" if ends == text else "stop")


def test_a_stop_string_needs_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer"):
        Stopper({2}, ("END",), None, 5)
