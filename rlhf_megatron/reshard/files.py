"""HF directories: read only this rank's slices of the weights, and write a whole directory from sharded ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..layouts.families import family_of
from ..layouts.families.base import LM_HEAD, VALUE_HEAD
from ..layouts.hf import HFLayout
from ..layouts.mcore import MegatronLayout
from ..layouts.plan import make_plan
from .execute import Execution, check_tensors, view

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 2 << 30
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What travels with a model besides weights and config.json
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
              "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
              "generation_config.json")
_DERIVED = re.compile(r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")  # buffers that old checkpoints carry


class CheckpointError(ValueError):
    """A directory's weights are not those of the model; the message names files and tensors."""


class Checkpoint:
    """Names, shapes and slices of a directory's safetensors; no weight is read until `read`. Use as a context."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}  # safetensors' handles, which have no public type
        try:
            self.where = self._find()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def read(self, name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> Tensor:
        """The region [start, stop) of a tensor, read from the file without the rest of the tensor."""
        return self._slice(name)[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]

    def _slice(self, name: str) -> Any:
        return self._files[self.where[name]].get_slice(name)

    def _find(self) -> dict[str, str]:
        """Tensor -> file, from the files themselves; the index must agree."""
        if not self.directory.is_dir():
            raise FileNotFoundError(f"{self.directory}: no such directory")
        index = self.directory / INDEX
        listed: dict[str, str] | None = None
        if index.is_file():
            try:
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(listed.values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{index}: not an index of safetensors files (no usable weight_map)") from None
        elif (self.directory / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise FileNotFoundError(f"{self.directory}: neither {SINGLE} nor {INDEX}; only safetensors are read")
        where: dict[str, str] = {}
        doubled = []
        for name in names:
            path = _confined(self.directory, name)
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX} but not there")
            try:
                handle = self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
            for key in handle.keys():
                if key in where:
                    doubled.append(f"{key} ({where[key]} and {name})")
                where[key] = name
        if doubled:
            raise CheckpointError(f"{self.directory}: tensors in two files: {_few(doubled)}")
        if listed is not None:
            wrong = sorted({key for key in listed.keys() | where.keys() if listed.get(key) != where.get(key)})
            if wrong:
                raise CheckpointError(f"{index}: does not agree with the files about {_few(wrong)}")
        return where


def load_hf(directory: str | Path, layout: MegatronLayout, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill `tensors` (this rank's Megatron parameters, by local name) from an HF directory, reading only its slices.

    Values are converted to the parameters' dtypes; padded vocabulary rows become zero. Names and shapes are checked
    first, all of them, on every rank. Returns the canonical names that the directory does not have and may lack
    (score.weight of a value head): those parameters are left as they are. CheckpointError names missing, unknown,
    doubled and misshapen tensors.
    """
    found = check_tensors(layout, rank, tensors, "model")
    if found:
        raise CheckpointError(f"the model does not fit its layout: {'; '.join(found)}")
    with Checkpoint(directory) as checkpoint, torch.no_grad():
        absent = _check_names(checkpoint, layout)
        for local in layout.padding(rank):
            tensors[local].zero_()
        for place in layout.placements(rank):
            if place.box.tensor not in absent:
                into = view(tensors[place.local], place.offset, place.box.size)
                into.copy_(checkpoint.read(place.box.tensor, place.box.start, place.box.stop))
    return absent


def _check_names(checkpoint: Checkpoint, layout: MegatronLayout) -> list[str]:
    wanted, have = layout.canonical_shapes(), checkpoint.where
    may_lack = {VALUE_HEAD} if layout.head == "value" else set()
    ignored = {name for name in have if _DERIVED.match(name)}
    if layout.head == "value" or layout.spec.tied:
        ignored.add(LM_HEAD)  # a critic has no use for it; under tied embeddings it is the embedding once more
    missing = [name for name in wanted if name not in have]
    unknown = sorted(have.keys() - wanted.keys() - ignored)
    wrong = [f"{name} {checkpoint.shape(name)} instead of {shape}" for name, shape in wanted.items()
             if name in have and checkpoint.shape(name) != shape]
    kinds = sorted({checkpoint.dtype(name) for name in wanted if name in have} - DTYPES.keys())
    problems = [f"{title}: {_few(names)}" for title, names in (
        ("missing", [name for name in missing if name not in may_lack]), ("unknown", unknown), ("wrong shape", wrong),
        ("element types that are not read", kinds)) if names]
    if problems:
        raise CheckpointError(f"{checkpoint.directory} does not hold this {layout.spec.family} model"
                              f"{' with a value head' if layout.head == 'value' else ''}: {'; '.join(problems)}")
    return missing


def save_hf(directory: str | Path, layout: MegatronLayout, rank: int, tensors: Mapping[str, Tensor], *,
            source_dir: str | Path | None = None, dtype: torch.dtype = torch.float32,
            group: dist.ProcessGroup | None = None, max_shard_bytes: int = SHARD_BYTES,
            overwrite: bool = False) -> Path:
    """Export the model to an HF directory. Collective over `group`; the layout's ranks are ranks of the group.

    The layout's first rank receives tensor by tensor and writes shards of at most max_shard_bytes (a larger tensor
    has a shard of its own), so it never holds much more than one shard. Everything is written to a temporary directory
    beside the final one and renamed when complete. Tokenizer, chat template and generation config are copied from
    source_dir. All ranks return when the directory is there, or all raise.
    """
    directory = Path(directory)
    target = HFLayout(layout.spec, (layout.ranks[0],), layout.head)
    plan = make_plan(layout, target, itemsize=dtype.itemsize, interleave=False)
    run = Execution(plan, group)
    if rank != run.rank:
        raise ValueError(f"rank={rank}, but this process is rank {run.rank} of the group; pass the rank in the group")
    writer, failure = None, None
    if run.rank == layout.ranks[0]:
        try:
            writer = _Writer(directory, target, dtype, max_shard_bytes, overwrite)
        except Exception as error:  # told to all ranks below
            failure = error
    _all_or_none(failure, run, directory)
    try:
        run.prepare(tensors, None, dtype)
        for index in range(plan.num_rounds):
            arriving = writer.arriving(plan.round_tensors(index), run) if writer else {}
            run.round(index, tensors, arriving)
            if writer and failure is None:
                try:
                    writer.round_done(plan.round_tensors(index))
                except Exception as error:  # whatever it is: keep receiving, so that nobody waits for this rank
                    failure = error
                    writer.drop()
            elif writer:
                writer.drop()
        if writer and failure is None:
            try:
                writer.finish(source_dir)
            except Exception as error:  # told to all ranks below
                failure = error
        _all_or_none(failure, run, directory)
    finally:
        if writer:
            writer.close()
    return directory


class _Writer:
    """The receiving side of an export: tensors come in, shards and the files around them go out."""

    def __init__(self, directory: Path, target: HFLayout, dtype: torch.dtype, max_shard_bytes: int,
                 overwrite: bool) -> None:
        if directory.exists() and not overwrite:
            raise FileExistsError(f"{directory} exists; choose another directory, remove it, or pass overwrite=True")
        self.directory, self.target, self.dtype, self.overwrite = directory, target, dtype, overwrite
        self.shapes = target.canonical_shapes()
        self.partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        self.shards = list(_shards(self.shapes, dtype.itemsize, max_shard_bytes))
        self.held: dict[str, Tensor] = {}   # complete, not yet written
        self.coming: dict[str, Tensor] = {}  # begun, not yet complete
        self.written: dict[str, str] = {}    # tensor -> file
        self.done = 0                        # shards written

    def arriving(self, names: list[tuple[str, bool]], run: Execution) -> dict[str, Tensor]:
        """Memory for a round's tensors, made when their first rows come."""
        for name, _ in names:
            if name not in self.coming:
                self.coming[name] = torch.empty(self.shapes[name], dtype=self.dtype, device=run.device)
        return self.coming

    def round_done(self, names: list[tuple[str, bool]]) -> None:
        for name, last in names:
            if last:
                self.held[name] = self.coming.pop(name).cpu()
        count = len(self.shards)
        while self.done < count and all(name in self.held for name in self.shards[self.done]):
            shard, number = self.shards[self.done], self.done
            file = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            tensors = {name: self.held.pop(name) for name in shard}
            save_file(tensors, str(self.partial / file), metadata={"format": "pt"})
            self.written.update(dict.fromkeys(shard, file))
            self.done += 1

    def drop(self) -> None:
        """After a failure: memory is given back as soon as a round is over."""
        self.held.clear()
        self.coming.clear()

    def finish(self, source_dir: str | Path | None) -> None:
        missing = sorted(self.shapes.keys() - self.written.keys())
        if missing:
            raise CheckpointError(f"export is incomplete, not written: {_few(missing)}")
        if len(self.shards) > 1:
            total = sum(_elements(shape) for shape in self.shapes.values()) * self.dtype.itemsize
            _write_json(self.partial / INDEX, {"metadata": {"total_size": total},
                                               "weight_map": dict(sorted(self.written.items()))})
        spec = self.target.spec
        config = family_of(spec.family).hf_config(spec, self.target.head)
        name = str(self.dtype).removeprefix("torch.")
        old = config.pop("torch_dtype", None) is not None and "dtype" not in config
        config["torch_dtype" if old else "dtype"] = name
        _write_json(self.partial / "config.json", config)
        if source_dir is not None:
            copy_companions(source_dir, self.partial)
        old_directory = self.directory.with_name(f".{self.directory.name}.old-{os.getpid()}")
        if self.overwrite and self.directory.exists():
            os.replace(self.directory, old_directory)
        os.replace(self.partial, self.directory)
        shutil.rmtree(old_directory, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


def copy_companions(source_dir: str | Path, target_dir: str | Path) -> list[str]:
    """Copy tokenizer, chat template and generation config, those that exist -> their names."""
    source_dir, copied = Path(source_dir), []
    for name in COMPANIONS:
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, Path(target_dir) / name)
            copied.append(name)
    if (source_dir / "additional_chat_templates").is_dir():
        shutil.copytree(source_dir / "additional_chat_templates", Path(target_dir) / "additional_chat_templates")
        copied.append("additional_chat_templates")
    return copied


def _all_or_none(failure: Exception | None, run: Execution, directory: Path) -> None:
    """Raise on every rank when the writing rank failed."""
    if not run.alone:
        flag = torch.tensor([failure is not None], dtype=torch.int64, device=run.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=run.group)
        if failure is None and int(flag):
            raise CheckpointError(f"export to {directory} failed on its writing rank; see that rank's error")
    if failure is not None:
        raise failure


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = _elements(shape) * itemsize
        if names and filled + size > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _confined(directory: Path, name: object) -> Path:
    """A file of the directory by plain name; links may lead only inside it, or to the blobs of its own hub cache."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name:
        raise CheckpointError(f"{directory / INDEX} names {name!r}: only plain file names of the directory are read")
    path, inside = directory / name, [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        inside.append(directory.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(root) for root in inside):
        raise CheckpointError(f"{path} is a link that leads out of the directory; copy the file into it")
    return path


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _few(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
