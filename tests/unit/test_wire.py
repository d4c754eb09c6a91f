"""Values survive the wire exactly; what cannot travel is refused with its path."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_megatron.controller import wire
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.observe.metrics import Max, Mean, Min, Sum


def trip(value):
    return wire.unpack([bytes(frame) for frame in wire.pack(value)])


def test_plain_values():
    items = [1, -2, 2**63 - 1, True, None, 1.5, "text", b"bytes"]
    value = {"a": items, "t": (1, [2, (3,)]), 4: {"$": "dollar"}, "e": {}}
    back = trip(value)
    assert back == value and type(back["t"]) is tuple and type(back["t"][1][1]) is tuple and type(back["a"][3]) is bool
    assert math.isnan(trip([float("nan"), {}])[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
                                   torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors(dtype):
    matrix = torch.arange(6).reshape(2, 3)
    for tensor in (matrix, matrix.t(), torch.tensor(1), torch.zeros(0, 4)):
        tensor = tensor.to(dtype)
        back = trip({"x": tensor})["x"]
        assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    grown = torch.ones(2, requires_grad=True)
    assert not trip(grown).requires_grad


def proto():
    return DataProto(
        {"prompts": Ragged.from_list([[1, 2], [], [3]], dtype=torch.int64),
         "x": torch.tensor([[1.5, 2.0], [0.25, -3.0], [9.0, 0.0]]).bfloat16()},
        {"row": [{"answer": "4", "n": [1, {"deep": None}]}, {}, {"x": 1.0}], "sample_id": [7, 8, 9]},
        {"denominator": 12.5, "tuple": (1, 2)},
    )


def test_batches_and_metrics():
    assert trip((proto(), {"m": Mean(1, 3)}))[0].equal(proto())
    metrics = {"a": Mean(1, 3), "b": Max(None), "c": Min(-1.0), "d": Sum(2.0)}
    assert trip(metrics) == metrics
    assert trip(DataProto()).equal(DataProto())


def test_one_flat_buffer_for_a_broadcast():
    flat = wire.flatten(wire.pack(proto()))
    assert flat.dtype == torch.uint8 and flat.dim() == 1
    back = wire.unflatten(flat.clone())
    assert back.equal(proto())
    assert wire.unflatten(wire.flatten(wire.pack([1, {}]))) == [1, {}]


def test_misaligned_and_read_only_frames():
    header, data = wire.pack(torch.arange(4, dtype=torch.int64))
    shifted = memoryview(bytearray(b"x" + bytes(data)))[1:]
    back = wire.unpack([header, shifted])
    assert torch.equal(back, torch.arange(4))
    back += 1  # what was received may be written to


def test_refusals_name_the_path():
    with pytest.raises(wire.WireError, match=r"value\['a'\]\[1\] is a pathlib"):
        wire.pack({"a": [1, Path("x")]})
    with pytest.raises(wire.WireError, match=r"value.non_tensors\['row'\]\[0\] is a builtins.set"):
        wire.pack(DataProto(non_tensors={"row": [{1}]}))
    with pytest.raises(wire.WireError, match="complex64"):
        wire.pack(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(wire.WireError, match="64 bit"):
        wire.pack({"big": 2**70})


def test_damaged_messages_are_refused():
    frames = wire.pack({"x": torch.arange(4), "n": 1})
    for damaged in (frames[:1], [frames[0], b"123"], [b"\xc1", frames[1]], [frames[0][:-3], frames[1]], [b"\x01"]):
        with pytest.raises(wire.WireError):
            wire.unpack(damaged)
