"""The converter's own part, writing the directory; reading GGUF is transformers' work and replaced here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from model_converters.gguf_to_hf import ConversionError, convert


@pytest.fixture
def meanwhile(monkeypatch):
    """What happens while a model is written, between its config and its weights: set `meanwhile.do`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  (not lazy any more: can be replaced)

    between = SimpleNamespace(do=lambda: None)

    class Model:
        def __init__(self):
            self.config, self.text = SimpleNamespace(), str(os.getpid())

        def save_pretrained(self, folder):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(self.text)
            between.do()
            folder.mkdir(exist_ok=True)
            (folder / "model.safetensors").write_text(self.text)

    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=2,
                                save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("{}"))
    for name, make in (("AutoModelForCausalLM", Model), ("AutoTokenizer", lambda: tokenizer)):
        reader = SimpleNamespace(from_pretrained=lambda *a, make=make, **k: make())
        monkeypatch.setattr(sys.modules["transformers"], name, reader)
    return between


@pytest.fixture
def gguf(tmp_path) -> Path:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    return tmp_path / "m.gguf"


def test_a_second_process_neither_breaks_nor_replaces_the_first(meanwhile, gguf, tmp_path):
    """A whole conversion by another process while this one writes: its output stays, and this one does not fail."""
    out, other = tmp_path / "out", []

    def another_process():
        pid = os.fork()
        if pid == 0:
            meanwhile.do = lambda: None
            try:
                convert(gguf, out)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        other.append(str(pid))

    meanwhile.do = another_process
    assert convert(gguf, out) == out
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        "config.json": other[0], "model.safetensors": other[0], "tokenizer.json": "{}"}
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out"]


def test_an_existing_output_is_replaced_only_by_force(meanwhile, gguf, tmp_path):
    out = convert(gguf, tmp_path / "out")
    (out / "mine").write_text("")
    with pytest.raises(ConversionError, match="exists already"):
        convert(gguf, out)
    assert (out / "mine").is_file()
    convert(gguf, out, force=True)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_failing_disk_leaves_nothing(meanwhile, gguf, tmp_path):
    def full():
        raise OSError(28, "No space left on device")

    meanwhile.do = full
    with pytest.raises(ConversionError, match="No space left"):
        convert(gguf, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]
