"""The seam patches what the installed megatron-core has, and nothing that other libraries use."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from rlhf_megatron import devices
from rlhf_megatron.mcore import cpu_seam, known_warnings


@pytest.mark.parametrize("module, attribute", cpu_seam.symbols())
def test_every_patched_symbol_exists_in_the_installed_version(module, attribute):
    owner = torch.Tensor if module == "torch.Tensor" else importlib.import_module(module)
    assert hasattr(owner, attribute)


def test_a_symbol_outside_the_table_or_the_version_is_refused(monkeypatch):
    with pytest.raises(KeyError, match="not in the table"):
        cpu_seam._put("torch", "no_such", None)
    monkeypatch.setitem(cpu_seam.PATCHES, ("torch", "no_such"), "for the test")
    with pytest.raises(RuntimeError, match="must be revised"):
        cpu_seam._put("torch", "no_such", None)


def test_transformers_loads_a_checkpoint_as_without_the_seam(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    cpu_seam.install()
    made = LlamaForCausalLM(LlamaConfig(vocab_size=22, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=1))
    made.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)
    assert torch.zeros.__module__ != cpu_seam.__name__


def test_devices_refuse_what_is_not_there(monkeypatch):
    monkeypatch.setattr(devices, "_chosen", None)
    with pytest.raises(ValueError, match="run.device='tpu'"):
        devices.choose("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no GPU"):
            devices.choose("cuda")
    assert devices.choose("cpu").type == "cpu" and devices.backend() == "gloo"
    with pytest.raises(ValueError, match="float16"):
        devices.dtype("float16")
    assert devices.memory_peak_mb() > 10


def test_only_known_warnings_are_left_out():
    known_warnings.silence(cuda=False)
    with warnings.catch_warnings(record=True) as shown:
        for message, module in (
            ("full scope is deprecated. Use", "megatron.core.models.backends"),
            ("full scope is deprecated. Use", "somebody.else"),
            ("Something new", "megatron.core.models.backends"),
            ("`torch.distributed.all_gather_into_tensor` is deprecated.", "torch.distributed.c10d_logger"),
            ("`torch.distributed.another` is deprecated.", "torch.distributed.c10d_logger"),
        ):
            warnings.warn_explicit(message, UserWarning, f"{module}.py", 1, module=module)
    assert [str(w.message) for w in shown] == [
        "full scope is deprecated. Use", "Something new", "`torch.distributed.another` is deprecated."]
