"""A DataProto in a directory: batch.safetensors (all tensors) and batch.json (everything else). No pickle."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_megatron.data.proto import BatchError, DataProto
from rlhf_megatron.data.ragged import Ragged

FORMAT = 1


def save_batch(batch: DataProto, folder: Path) -> None:
    """Write aside, sync, rename: `folder` is complete or not there. A complete older one is replaced.

    Raises:
        BatchError: a non-tensor or meta value is not JSON (or would come back as something else).
    """
    flat: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    taken: set[int] = set()  # storages already in the file: fields often share their lengths
    for name, value in batch.tensors.items():
        if isinstance(value, Ragged):
            kinds[name] = "ragged"
            flat[f"{name}/values"] = _own_storage(value.values, taken)
            flat[f"{name}/lengths"] = _own_storage(value.lengths, taken)
        else:
            kinds[name] = "dense"
            flat[name] = _own_storage(value, taken)
    document = {
        "format": FORMAT,
        "rows": len(batch),
        "tensors": kinds,
        "non_tensors": {name: _as_json(f"field {name!r}", items) for name, items in batch.non_tensors.items()},
        "meta": {name: _as_json(f"meta {name!r}", item) for name, item in batch.meta.items()},
    }
    aside = folder.parent / f".writing-{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(flat, aside / "batch.safetensors")
    with open(aside / "batch.json", "w", encoding="utf-8") as handle:
        json.dump(document, handle)
        handle.flush()
        os.fsync(handle.fileno())
    if folder.exists():
        if not (folder / "batch.json").is_file():
            raise BatchError(f"{folder} exists and is not a saved batch: not replaced")
        shutil.rmtree(folder)
    os.rename(aside, folder)


def load_batch(folder: Path) -> DataProto:
    """Read a directory that `save_batch` wrote.

    Raises:
        BatchError: a file is missing, damaged, or of another format.
    """
    try:
        document = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
        flat = load_file(folder / "batch.safetensors")
    except FileNotFoundError as error:
        raise BatchError(f"{folder} is not a saved batch: {error.filename or error} is missing") from error
    except (ValueError, SafetensorError) as error:
        raise BatchError(f"{folder}: damaged batch ({error})") from error
    if document.get("format") != FORMAT:
        raise BatchError(f"{folder}: batch format {document.get('format')!r}, this version reads {FORMAT}")
    try:
        tensors = {
            name: Ragged(flat[f"{name}/values"], flat[f"{name}/lengths"]) if kind == "ragged" else flat[name]
            for name, kind in document["tensors"].items()
        }
        batch = DataProto(tensors, document["non_tensors"], document["meta"])
    except KeyError as error:
        raise BatchError(f"{folder}: batch.json names {error}, which batch.safetensors does not hold") from error
    if len(batch) != document["rows"]:
        raise BatchError(f"{folder}: {len(batch)} rows in the tensors, {document['rows']} in batch.json")
    return batch


def _own_storage(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor on the CPU, contiguous, and a copy where it shares storage: safetensors refuses shared storage."""
    tensor = tensor.detach().cpu().contiguous()
    storage = tensor.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    taken.add(tensor.untyped_storage().data_ptr())
    return tensor


def _as_json(what: str, value: Any) -> Any:
    """`value` if JSON gives it back unchanged (NaN included), else BatchError."""

    def check(item: Any) -> None:
        if item is None or isinstance(item, (bool, int, float, str)):
            return
        if isinstance(item, list):
            for part in item:
                check(part)
        elif isinstance(item, dict) and all(isinstance(key, str) for key in item):
            for part in item.values():
                check(part)
        else:
            raise BatchError(f"{what} holds {type(item).__name__} {item!r:.80}, which JSON cannot give back unchanged; "
                             "use numbers, strings, lists and dicts with string keys")

    check(value)
    return value
