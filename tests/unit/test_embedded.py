"""The embedded engine: transformers' model gives the same tokens whatever stands beside a row in its batch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rlhf_megatron.generation.embedded import EmbeddedEngine
from rlhf_megatron.generation.engine import Sampling
from toy_tokenizer import toy_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")  # gpt2: learned positions, which do not forgive a shift
PROMPTS = [[5, 6, 7], [9], [8] * 10, [4, 250, 31, 77], [6, 5]]


def write_model(folder, family, tied=False, vocab_size=260):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_model(path, request.param)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("one")
    write_model(path, "llama")
    return path


def engine_of(folder, batch_size=64) -> EmbeddedEngine:
    engine = EmbeddedEngine(folder, batch_size=batch_size)
    weights, into = load_file(folder / "model.safetensors"), engine.tensors()
    for name, tensor in into.items():
        tensor.copy_(weights[name])
    engine.finish_weights(list(into))
    return engine


def generate(engine, prompts, ids=None, **changes):
    sampling = Sampling(**{"max_tokens": 12, "seed": 3, **changes})
    return engine.generate(prompts, list(range(len(prompts))) if ids is None else ids, sampling)


def tokens(completions) -> list[list[int]]:
    return [c.token_ids for c in completions]


def assert_same(one, other):
    assert tokens(one) == tokens(other)
    for a, b in zip(one, other, strict=True):
        assert a.finish_reason == b.finish_reason
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_greedy_tokens_are_those_of_transformers(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = generate(engine_of(folder), PROMPTS, temperature=0.0)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == made[0, len(prompt):].tolist()


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probs_are_those_of_one_forward_over_the_whole_row(folder, kind):
    """Without cache, padding or neighbours: log-prob of token t from the position before it."""
    engine = engine_of(folder)
    found = generate(engine, PROMPTS, temperature=0.7, log_probs=kind)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt + completion.token_ids])).logits
            logits = logits[0, len(prompt) - 1 : -1].double()
        if kind == "processed":
            logits = logits / 0.7
        exact = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(exact.tolist(), abs=1e-5)


@pytest.mark.parametrize("pads", [0, 1, 7])
def test_left_padding_changes_nothing(folder, pads):
    prompt, engine = [5, 6, 7], engine_of(folder)
    alone = generate(engine, [prompt], ids=[4])
    engine.pad_id = 93  # a token like any other
    padded = generate(engine, [prompt, [11] * (3 + pads)], ids=[4, 5])
    assert_same(alone, padded[:1])


def test_positions_count_real_tokens_only(llama):
    """Rotary embeddings forgive a shift, so look at what the model is given: mask [0,0,1,1,1] -> [., ., 0, 1, 2]."""
    engine, seen = engine_of(llama), []

    def look(module, arguments, given):
        seen.append((given["position_ids"].clone(), given["attention_mask"].bool()))

    engine.model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    generate(engine, [[5, 6, 7], [11] * 5], max_tokens=3)
    positions, mask = seen[0]
    assert mask.tolist() == [[False, False, True, True, True], [True] * 5]
    assert positions[0, 2:].tolist() == [0, 1, 2] and positions[1].tolist() == [0, 1, 2, 3, 4]
    assert [later.tolist() for later, _ in seen[1:]] == [[[3], [5]], [[4], [6]]]


def test_neighbours_batch_size_and_order_change_nothing(folder):
    whole = generate(engine_of(folder), PROMPTS)
    for batch_size in (1, 3):
        assert_same(whole, generate(engine_of(folder, batch_size), PROMPTS))
    backwards = generate(engine_of(folder), PROMPTS[::-1], ids=[4, 3, 2, 1, 0])
    assert_same(whole, backwards[::-1])


def test_rows_that_end_early_change_nothing_for_the_others(llama):
    """Many stop tokens: rows end at different places, and the batch is compacted while others go on."""
    engine = engine_of(llama)
    prompts = [[5 + i, 6, 7][: 1 + i % 3] for i in range(24)]
    free = generate(engine, prompts)
    engine.stop_ids = frozenset(range(0, 260, 6))
    stopped = generate(engine, prompts)
    assert len({len(c.token_ids) for c in stopped}) > 4
    for a, b in zip(free, stopped, strict=True):
        n = len(b.token_ids)
        assert b.token_ids == a.token_ids[:n] and b.log_probs == pytest.approx(a.log_probs[:n], abs=1e-5)
        assert (b.finish_reason == "stop") == (b.token_ids[-1] in engine.stop_ids)
        assert not set(b.token_ids[:-1]) & engine.stop_ids


def test_what_ends_a_response_does_not_count_in_the_prompt(llama):
    for text in ("</s>x</s>", "END END"):
        engine, ids = engine_of(llama), list(range(70, 82))
        make_answer(engine, ids)
        [completion] = generate(engine, [engine.tokenizer(text)["input_ids"]], stop=("END",))
        assert completion.token_ids == ids and completion.finish_reason == "length"


def make_answer(engine, ids):
    """The engine's model answers one prompt with `ids`."""
    left = iter(ids)

    def only_the_next(module, arguments, logits):
        return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor(next(left)), 0.0)

    engine.model.get_output_embeddings().register_forward_hook(only_the_next)


@pytest.mark.parametrize(("text", "stop", "ends"), [
    ("one STOP two", "STOP", "one STOP"),
    ("a turn<|turn|>x", "<|turn|>", "a turn<|turn|>"),  # a special token, which the decoded text leaves out
    ("wait . more", " .", "wait ."),                    # a tokenizer may tidy spaces away
    ("wait</s>more", "more", "wait</s>"),
])
def test_stop_strings_end_a_response(tmp_path, text, stop, ends):
    write_model(tmp_path, "llama")
    engine = engine_of(tmp_path)
    engine.tokenizer.clean_up_tokenization_spaces = True
    engine.tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    make_answer(engine, engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    [completion] = generate(engine, [[5]], stop=(stop,), max_tokens=40)
    assert engine.tokenizer.decode(completion.token_ids, clean_up_tokenization_spaces=False) == ends
    assert completion.finish_reason == "stop" and completion.log_probs == [0.0] * len(completion.token_ids)


def test_only_the_vocabulary_is_sampled(tmp_path):
    """A vocabulary of 11 divides by nothing: all of it, and no padding, is drawn, each with -ln 11."""
    write_model(tmp_path, "llama", vocab_size=11)
    engine = engine_of(tmp_path)
    engine.stop_ids = frozenset()
    engine.tensors()["lm_head.weight"].zero_()
    found = generate(engine, [[5, 6]] * 20)
    assert {i for row in tokens(found) for i in row} == set(range(11))
    assert all(c.log_probs == pytest.approx([-2.397895] * 12, abs=1e-6) for c in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_are_not_sampled_from(llama, value, temperature):
    engine = engine_of(llama)
    engine.tensors()["model.norm.weight"][0] = value
    with pytest.raises(RuntimeError, match="sample 31, response token 0: the model's logits are NaN or inf"):
        generate(engine, [[5, 6]], ids=[31], temperature=temperature)


def test_samples_differ_by_id_step_and_seed(llama):
    engine = engine_of(llama)
    base = tokens(generate(engine, [[5, 6]] * 3, ids=[0, 1, 0]))
    assert base[0] == base[2] != base[1]
    assert tokens(generate(engine, [[5, 6]], ids=[0], step=1)) != base[:1]
    assert tokens(generate(engine, [[5, 6]], ids=[0], seed=4)) != base[:1]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_their_published_names_and_are_used_at_once(tmp_path, tied):
    write_model(tmp_path, "llama", tied)
    engine = engine_of(tmp_path)
    assert set(engine.tensors()) == set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in engine.tensors()) == (not tied)
    before = generate(engine, PROMPTS, temperature=0.0)
    engine.tensors()["model.norm.weight"].neg_()  # the likeliest token becomes the least likely
    engine.finish_weights(["model.norm.weight"])
    assert engine.weights_version == 2
    assert all(a != b for a, b in zip(tokens(before), tokens(generate(engine, PROMPTS, temperature=0.0)), strict=True))


def test_what_cannot_be_generated_is_refused(llama):
    engine = engine_of(llama)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(engine, [[5], []])
    with pytest.raises(ValueError, match="2 prompts but 1 sample ids"):
        generate(engine, [[5], [6]], ids=[0])
    with pytest.raises(ValueError, match="batch_size=0"):
        EmbeddedEngine(llama, batch_size=0)
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        generate(engine, [[5]])
    engine.wake()
    assert generate(engine, []) == [] and len(generate(engine, [[5]])) == 1


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_no_code_of_the_directory_runs(tmp_path, file):
    write_model(tmp_path, "llama")
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: ...\n")
    named = {
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}},
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
    }
    content = json.loads((tmp_path / file).read_text()) | named[file]
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError):
        EmbeddedEngine(tmp_path)
    assert not marker.exists()
