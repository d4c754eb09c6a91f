"""The random streams of one rank, saved and restored: Python's, numpy's, torch's, the device's, megatron-core's.

One file per rank, so that no rank can get another's streams. Plain tensors in safetensors: nothing is unpickled.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file

from rlhf_megatron import devices
from rlhf_megatron.layouts.spec import Coordinates
from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core import tensor_parallel  # noqa: E402


def file_name(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"


def save(path: Path) -> None:
    """Write all streams of this process. Call inside the role's groups: the tracker is the role's own."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    if version != 3 or kind != "MT19937":
        raise RuntimeError(f"random state version {version} / numpy generator {kind} is not known to this code")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if devices.is_cuda():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        tensors[f"tracker.{name}"] = state.cpu()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def load(path: Path) -> None:
    """Restore what `save` wrote."""
    tensors = load_file(path)
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    numpy.random.set_state(
        ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, tensors["numpy_gauss"].item())
    )
    torch.set_rng_state(tensors["torch"])
    if devices.is_cuda() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    tracked = {name.removeprefix("tracker."): state for name, state in tensors.items() if name.startswith("tracker.")}
    if tracked:
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def reseed(seed: int, step: int, at: Coordinates) -> None:
    """Fresh streams from the seed, the step and the rank's place; megatron-core's differ over tp and pp only."""
    own = _mix(seed, step, *at)
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in states.items():
        shared_by_tp = name.startswith("data-parallel")
        fresh = _mix(seed, step, name, at.pp, 0 if shared_by_tp else at.tp)
        states[name] = torch.Generator(device=devices.device()).manual_seed(fresh).get_state()
        states[name] = states[name].to(state.device)
    tracker.set_states(states)


def _mix(*parts: object) -> int:
    """A 32-bit seed from the parts, the same in every process (unlike hash())."""
    return zlib.crc32(repr(parts).encode())
