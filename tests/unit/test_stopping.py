"""When a response ends, and what of it counts: by lengths and finish reason, never by comparing ids."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlhf_megatron.config.schema import GenerationConfig
from rlhf_megatron.data.positions import truncated
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.generation.engine import Completion
from rlhf_megatron.generation.stopping import Stopper, special_ids, stop_token_ids
from rlhf_megatron.workers.actor import ActorWorker
from toy_tokenizer import EOS, TURN, toy_tokenizer


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
    ("no 🙂 yes", ["🙂"], "no 🙂"),       # four
    ("é" * 40 + "→Ω→", ["→Ω→"], "é" * 40 + "→Ω→"),  # the decoded tail starts inside a character
    ("no such text", ["absent"], "no such text"),
])
def test_stop_strings_across_tokens_and_bytes(tokenizer, text, stops, ends):
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found, reason = cut(ids, Stopper({2}, stops, decode, len(ids)))
    assert decode(found) == ends and reason == ("stop" if any(stop in text for stop in stops) else "length")


def test_a_stop_string_that_is_a_special_token_stands_for_its_id(tokenizer):
    """Decoded text leaves special tokens out, so there it would never be found."""
    assert special_ids(tokenizer, ("<|turn|>", "</s>", "turn", "a")) == {TURN, EOS}
    assert special_ids(tokenizer, ()) == special_ids(None, ("<|turn|>",)) == frozenset()


def test_the_actor_masks_by_length_although_pad_is_an_end_token():
    """Pad = EOS = 9. Every response is valid up to its length, the token that ended it included."""
    made = [([5, 6, 9], "stop"), ([5, 6, 7, 8, 4], "length"), ([5, 6], "stop"), ([5, 8], "stop"), ([9], "stop")]
    completions = [Completion(ids, [-float(i) for i in ids], reason) for ids, reason in made]
    actor = SimpleNamespace(
        config=SimpleNamespace(generation=GenerationConfig(max_response_tokens=5), trainer=SimpleNamespace(seed=0)),
        session=nullcontext(), plan=SimpleNamespace(bytes_shared=0, bytes_permuted=0, bytes_moved=0),
        generator=SimpleNamespace(generate=lambda prompts, sample_ids, sampling: completions))
    batch = DataProto({"prompts": Ragged.from_list([[9, 1]] * 5)}, {"sample_id": list(range(5))})
    out, _ = ActorWorker.generate(actor, batch, step=1)
    assert out["responses"].pad(9).tolist() == [
        [5, 6, 9, 9, 9], [5, 6, 7, 8, 4], [5, 6, 9, 9, 9], [5, 8, 9, 9, 9], [9, 9, 9, 9, 9]]
    assert out["response_mask"].pad(False).int().tolist() == [
        [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert out["rollout_log_probs"].to_list() == [c.log_probs for c in completions]
    assert truncated(out["finish_reason"]).tolist() == [False, True, False, False, False]


def test_a_stop_string_needs_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer"):
        Stopper({2}, ("END",), None, 5)
