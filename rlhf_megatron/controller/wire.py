"""Values on the wire: a msgpack header, then one raw frame per tensor. Nothing is pickled, in either direction.

    frames = pack({"method": "update", "rows": batch})        # [header, tensor bytes, tensor bytes, ...]
    value = unpack(frames)

What may travel: None, bool, int (64 bit), float, str, bytes, list, tuple, dict, torch.Tensor, DataProto, Ragged and
metrics. Everything else is refused with the path to the offending value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.observe import metrics

_TAG = "$"  # a dict with this key is a node of ours; a user's dict that has the key is sent as a list of pairs
_PLAIN = (type(None), bool, int, float, str)
_METRICS = (metrics.Mean, metrics.Sum, metrics.Max, metrics.Min)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
                  torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[Any, list[tuple[str, list[int]]]])  # tree, (dtype, shape) of each tensor
ALIGN = 16  # bytes: where a tensor starts in a flat buffer


class WireError(TypeError):
    """A value that cannot be sent; the message holds the path to it."""


def pack(value: Any) -> list[Any]:
    """Frames of a value. Tensor frames are views of the tensors' memory (CPU) or of a copy (other devices, strided).

    Do not write to a sent tensor before the answer has come.
    """
    tensors: list[torch.Tensor] = []
    try:
        tree = _encode(value, "value", tensors)
        specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        header = _ENCODER.encode([tree, specs])
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise WireError(f"a value cannot be sent ({error}); integers are limited to 64 bits") from error
    return [header, *(_bytes_of(t) for t in tensors)]


def unpack(frames: Sequence[Any]) -> Any:
    """The value of `pack`'s frames. Frames may be bytes, buffers or zmq frames; tensors are views of their memory.

    Raises:
        WireError: the frames do not fit their header.
    """
    try:
        tree, specs = _DECODER.decode(_buffer(frames[0]))
        if len(specs) != len(frames) - 1:
            raise ValueError(f"header names {len(specs)} tensors but {len(frames) - 1} frames follow")
        tensors = [_tensor(_buffer(frame), *spec) for frame, spec in zip(frames[1:], specs, strict=True)]
        return _decode(tree, tensors)
    except (ValueError, KeyError, IndexError, RuntimeError, msgspec.DecodeError) as error:
        raise WireError(f"received a message that does not decode: {error}") from error


def flatten(frames: Sequence[Any]) -> torch.Tensor:
    """One uint8 tensor that holds all frames, each at a multiple of ALIGN bytes, after an int64 table of sizes."""
    buffers = [memoryview(_buffer(frame)).cast("B") for frame in frames]
    table = torch.tensor([len(buffers), *(b.nbytes for b in buffers)], dtype=torch.int64).view(torch.uint8)
    starts, end = _starts(table.numel(), [b.nbytes for b in buffers])
    flat = torch.zeros(end, dtype=torch.uint8)
    flat[: table.numel()] = table
    for start, buffer in zip(starts, buffers, strict=True):
        if buffer.nbytes:
            flat[start : start + buffer.nbytes] = torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer,
                                                                   dtype=torch.uint8)
    return flat


def unflatten(flat: torch.Tensor) -> Any:
    """The value whose frames `flatten` joined. `flat` is on the CPU; tensors are views of it."""
    count = int(flat[:8].view(torch.int64))
    sizes = flat[8 : 8 * (count + 1)].view(torch.int64).tolist()
    starts, _ = _starts(8 * (count + 1), sizes)
    return unpack([flat[a : a + size].numpy() for a, size in zip(starts, sizes, strict=True)])


def _starts(first: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, end = [], first
    for size in sizes:
        end = -(-end // ALIGN) * ALIGN
        starts.append(end)
        end += size
    return starts, end


def _encode(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN or kind is bytes:
        return value
    if kind is list:
        if all(type(item) in _PLAIN for item in value):  # long lists of ids: no need to walk them in Python twice
            return value
        return [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {_TAG: "tuple", "v": [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]}
    if kind is dict:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: _encode(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
        pairs = [[_encode(key, f"{path} key", tensors), _encode(item, f"{path}[{key!r}]", tensors)]
                 for key, item in value.items()]
        return {_TAG: "dict", "v": pairs}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "v": _add(value, path, tensors)}
    if isinstance(value, Ragged):
        return {_TAG: "ragged", "v": _add(value.values, path, tensors), "l": _add(value.lengths, path, tensors)}
    if isinstance(value, DataProto):
        parts = {name: _encode(getattr(value, name), f"{path}.{name}", tensors) for name in
                 ("tensors", "non_tensors", "meta")}
        return {_TAG: "proto", "v": parts}
    if isinstance(value, _METRICS):
        return {_TAG: "metric", "v": value.to_list()}
    raise WireError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: only None, bool, int, "
                    "float, str, bytes, list, tuple, dict, tensors, DataProto, Ragged and metrics can; convert it")


def _add(tensor: torch.Tensor, path: str, tensors: list[torch.Tensor]) -> int:
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES or tensor.layout != torch.strided:
        raise WireError(f"{path} is a tensor of {tensor.dtype}, {tensor.layout}: only dense {', '.join(_DTYPES)} can "
                        "be sent")
    tensors.append(tensor.detach())
    return len(tensors) - 1


def _decode(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) if isinstance(item, (list, dict)) else item for item in node]
    if not isinstance(node, dict):
        return node
    tag = node.get(_TAG)
    if tag is None:
        return {key: _decode(item, tensors) for key, item in node.items()}
    value = node["v"]
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in value)
    if tag == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value}
    if tag == "tensor":
        return tensors[value]
    if tag == "ragged":
        return Ragged(tensors[value], tensors[node["l"]])
    if tag == "proto":
        return DataProto(**{name: _decode(part, tensors) for name, part in value.items()})
    if tag == "metric":
        return metrics.from_list(value)
    raise ValueError(f"unknown node {tag!r}")


def _bytes_of(tensor: torch.Tensor) -> Any:
    if tensor.numel() == 0:
        return b""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _buffer(frame: Any) -> Any:
    return frame.buffer if hasattr(frame, "buffer") else frame  # zmq frames keep their memory in `.buffer`


def _tensor(buffer: Any, dtype_name: str, shape: list[int]) -> torch.Tensor:
    dtype = _DTYPES[dtype_name]
    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if view.readonly:
        view = memoryview(bytearray(view))
    flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:  # small zmq frames live at odd addresses
        flat = flat.clone()
    return flat.view(dtype).view(shape)
