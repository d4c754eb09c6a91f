"""What leaves the device between phases, parameters, gradients and optimizer state, and comes back into its storages.

A tensor is a view of a storage. Freed and allocated again under the same storage object, every view and alias of it
stays valid: DDP's flat buffers, master weights that are slices of them, a generation engine that shares weights. New
data for a tensor (`parameter.data = ...`) would break each of these silently. While a storage is away its views must
not be read or written: they point to address 0, so on CPU the process dies and on a GPU the kernel fails; the engine's
methods bring back what they need (`needs`). A storage may come back at another address: what recorded addresses, such
as a CUDA graph, has to be recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from rlhf_megatron import devices

if TYPE_CHECKING:
    from rlhf_megatron.mcore.engine import MegatronEngine

PARTS = ("parameters", "gradients", "optimizer")
# Bytes of a host buffer, which many small storages share and a large one has several of: the allocator of pinned memory
# rounds each request up to a power of two, 9 GiB to 16.
CHUNK = 1 << 28

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Storages:
    """The storages of one engine, by part, each in one part only.

    `parameters`: the model's, with DDP's flat buffers; `gradients`: DDP's; `optimizer`: what is neither, that is
    moments, and fp32 masters where they are not the parameters themselves. They are looked up anew each time: loading a
    checkpoint may replace them.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self._away: dict[str, list[_Away]] = {part: [] for part in PARTS}

    def offload(self, *parts: str) -> None:
        """Free the device memory of these parts; a part that is away already stays so.

        Values are kept in host memory (pinned on a GPU), except gradients, which nobody reads between two updates.

        Raises:
            ValueError: an unknown part.
            RuntimeError: a storage whose memory torch does not own (mapped from a file, or shared between processes).
        """
        here = self._storages() if parts else {}
        leaving: list[tuple[str, _Away]] = []
        for part in dict.fromkeys(_known(parts)):
            storages = [storage for storage in here[part] if storage.nbytes()]
            _require_resizable(part, storages)
            host = _Host(sum(storage.nbytes() for storage in storages))
            for storage in storages:
                kept = None if part == "gradients" else list(host.take(storage.nbytes()))
                leaving.append((part, _Away(storage, kept)))
        if not leaving:
            return
        devices.synchronize()  # the copies are complete before their sources are freed
        for part, away in leaving:
            away.free()
            self._away[part].append(away)
        devices.release_memory()

    def reload(self, *parts: str) -> None:
        """Bring these parts back, bit-equal (gradients as zeros); a part that is here already stays as it is.

        Raises:
            ValueError: an unknown part.
            torch.OutOfMemoryError: the device has no room. What is not back yet can still be reloaded later.
        """
        for part in _known(parts):
            while self._away[part]:
                self._away[part][-1].back()
                self._away[part].pop()

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each part that are on the device now."""
        return {part: sum(s.nbytes() for s in storages) for part, storages in self._storages().items()}

    def bytes_away(self) -> int:
        """Bytes of all parts that `offload` freed and `reload` would need."""
        return sum(away.size for parts in self._away.values() for away in parts)

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        seen: set[int] = set()
        tensors = {"parameters": self._parameters(), "gradients": self._gradients(), "optimizer": self._state()}
        return {part: list(_unique(tensors[part], seen)) for part in PARTS}

    def _buffers(self) -> list[Any]:
        chunks = [] if self.engine.optimizer is None else self.engine.ddp
        return [buffer for ddp in chunks for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for chunk in self.engine.chunks:
            yield from chunk.parameters()
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)

    def _gradients(self) -> Iterator[torch.Tensor]:
        yield from (buffer.grad_data for buffer in self._buffers())

    def _state(self) -> Iterator[torch.Tensor]:
        for part in [] if self.engine.optimizer is None else self.engine.optimizer.chained_optimizers:
            if part.is_stub_optimizer:  # a rank without parameters
                continue
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class _Away:
    """A storage whose memory is on the host: `host` has its bytes in order, None when it comes back as zeros."""

    def __init__(self, storage: torch.UntypedStorage, host: list[torch.Tensor] | None) -> None:
        self.storage, self.size, self.host = storage, storage.nbytes(), host
        for piece, there in self._pieces():
            there.copy_(piece, non_blocking=True)

    def free(self) -> None:
        self.storage.resize_(0)

    def back(self) -> None:
        """Allocate and fill the storage. What the device does next waits for the copies; the caller need not."""
        self.storage.resize_(self.size)
        if self.host is None:
            self._flat().zero_()
        for piece, there in self._pieces():
            piece.copy_(there, non_blocking=True)

    def _flat(self) -> torch.Tensor:
        """The storage's bytes, whatever the dtypes of its views."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the storage, its place on the host), together all that is kept."""
        if self.host is not None:
            yield from zip(self._flat().split([len(there) for there in self.host]), self.host, strict=True)


class _Host:
    """`size` bytes of host memory, handed out in pieces."""

    def __init__(self, size: int) -> None:
        self._left, self._chunk = size, torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Iterator[torch.Tensor]:
        while size:
            if not len(self._chunk):
                self._chunk = devices.host_buffer(min(CHUNK, self._left))
                self._left -= len(self._chunk)
            piece, self._chunk = self._chunk[:size], self._chunk[size:]
            size -= len(piece)
            yield piece


def needs(*parts: str) -> Callable[[_Method], _Method]:
    """Marks a method of the engine: these parts are brought back before it runs; it never meets freed memory."""
    _known(parts)

    def mark(method: _Method) -> _Method:
        @wraps(method)
        def run(engine: MegatronEngine, *args: Any, **kwargs: Any) -> Any:
            engine.reload(*parts)
            return method(engine, *args, **kwargs)

        return cast(_Method, run)

    return mark


def _known(parts: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} cannot be offloaded: name one or more of {', '.join(PARTS)}")
    return parts


def _require_resizable(part: str, storages: list[torch.UntypedStorage]) -> None:
    for storage in storages:
        if not storage.resizable():
            raise RuntimeError(f"{part}: a storage of {storage.nbytes()} bytes is mapped or shared memory, which cannot"
                               " be freed and allocated again; do not offload it, or give the tensor its own memory")


def _unique(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Storages on the device behind the tensors, without those seen before."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # not by address: that is 0 for all that are away
        if storage._cdata not in seen and storage.device.type == devices.device().type:
            seen.add(storage._cdata)
            yield storage
