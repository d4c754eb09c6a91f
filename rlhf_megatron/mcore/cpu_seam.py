"""Run megatron-core without CUDA: a small table of patches, each with its reason. With CUDA nothing is patched.

`install()` comes before the first import of megatron.core. Written for megatron-core 0.16; what differs between its
versions belongs in this file too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhf_megatron import devices
from rlhf_megatron.mcore import known_warnings
from rlhf_megatron.mcore.adam import Adam

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "as_tensor")
# Modules of megatron.core that spell device="cuda" out. They alone see factories that mean the CPU by it: replacing the
# factories in torch itself would reach other libraries (transformers' loader builds wrong rotary buffers with it).
SPELLS_CUDA = tuple(f"megatron.core.{name}" for name in (
    "pipeline_parallel.schedules", "optimizer.optimizer", "optimizer.distrib_optimizer", "optimizer.grad_scaler",
    "optimizer.clip_grads", "distributed.param_and_grad_buffer", "transformer.utils",
    "models.common.embeddings.rope_utils", "utils",
))

# (module, attribute): why it is replaced
PATCHES: dict[tuple[str, str], str] = {
    ("torch.cuda", "current_device"): "the device of new buffers: layers, gradient buffers, the schedules",
    ("torch.cuda", "current_stream"): "asked for around communication; nothing is asynchronous to the host here",
    ("torch.cuda", "synchronize"): "after point-to-point messages and in timers",
    ("torch.cuda", "memory_allocated"): "read for reports; fails without a driver",
    ("torch.Tensor", "cuda"): "norms, token counts and flags are moved to 'the GPU' before a reduction",
    ("torch.Tensor", "type"): "gradients are bucketed by the name of their type, which must be a CUDA one",
    **{(module, "torch"): "its factories are called with device='cuda' or pinned memory" for module in SPELLS_CUDA},
    ("megatron.core.tensor_parallel.random", "CudaRNGStatesTracker"): "random streams of model-parallel regions",
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state"): "activation recomputation saves the stream",
    ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state"): "and restores it",
    ("megatron.core.optimizer", "Adam"): "torch's AdamW keeps its step count where resume loses it (see adam.py)",
    ("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER"): "goes with Adam",
    ("megatron.core.optimizer.distrib_optimizer", "Adam"): "goes with Adam",
    ("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE"): "goes with Adam: the state layout is apex's",
    ("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER"): "goes with Adam",
}

_installed = False


def symbols() -> list[tuple[str, str]]:
    """Every (module, attribute) that is replaced on CPU; a test asserts that the installed version still has each."""
    return list(PATCHES)


def install() -> None:
    """Patch what the table names, once. Does nothing with CUDA."""
    global _installed
    if _installed:
        return
    known_warnings.silence(devices.is_cuda())
    if devices.is_cuda():
        return
    _installed = True
    _put("torch.cuda", "current_device", lambda: CPU)
    _put("torch.cuda", "current_stream", lambda device=None: _Stream())
    _put("torch.cuda", "synchronize", lambda device=None: None)
    _put("torch.cuda", "memory_allocated", lambda device=None: 0)
    _put("torch.Tensor", "cuda", lambda self, *args, **options: self)
    _put("torch.Tensor", "type", _cuda_type_name(torch.Tensor.type))
    # From here on megatron.core can be imported.
    _install_rng()
    view = _TorchOnCPU("torch")
    for module in SPELLS_CUDA:
        _put(module, "torch", view)
    for module in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        _put(module, "Adam", Adam)
    _put("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False)
    _put("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", True)
    _put("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER", True)


def _put(module: str, attribute: str, value: Any) -> None:
    if (module, attribute) not in PATCHES:
        raise KeyError(f"{module}.{attribute} is patched but not in the table of patches")
    owner = _owner(module)
    if not hasattr(owner, attribute):
        raise RuntimeError(
            f"{module}.{attribute} is not in the installed version; mcore/cpu_seam.py must be revised for it"
        )
    setattr(owner, attribute, value)


def _owner(module: str) -> Any:
    return torch.Tensor if module == "torch.Tensor" else importlib.import_module(module)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _TorchOnCPU(types.ModuleType):
    """torch, with factories that take device="cuda" for the CPU and leave memory unpinned."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for factory in FACTORIES:
            setattr(self, factory, _on_cpu(getattr(torch, factory)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        if _is_cuda(options.get("device")):
            options["device"] = CPU
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


def _cuda_type_name(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def named(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = type_of(self, *args, **options)
        if not args and not options and isinstance(result, str) and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    return named


class _Stream:
    """The one stream of a device that has none."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def _install_rng() -> None:
    module = "megatron.core.tensor_parallel.random"
    random: Any = importlib.import_module(module)
    default = "default-rng"

    class CPURNGStatesTracker(random.CudaRNGStatesTracker):
        """megatron-core's tracker over the CPU generator."""

        _current_state_name: str

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise RuntimeError(f"random stream {name!r} with seed {seed}: the name or the seed is taken")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator("cpu").manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(f"random stream {name!r} was never added")
            outer, outer_name = torch.get_rng_state(), self._current_state_name
            if outer_name != default:
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer if outer_name == default else self.states_[outer_name])
                self._current_state_name = outer_name

    _put(module, "CudaRNGStatesTracker", CPURNGStatesTracker)
    _put(module, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state())
    _put(module, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state))
