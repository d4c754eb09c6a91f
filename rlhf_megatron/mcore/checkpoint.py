"""An engine's state on disk, in megatron-core's distributed format: any parallel layout can read what another wrote.

    <directory>/engine.json          what was saved, by which layout, counters
    <directory>/state/               weights, fp32 masters and moments by global tensor (torch_dist)
    <directory>/rng_00003.safetensors   the random streams of rank 3, and of no other rank

Everything here is collective over the pool (its default process group). A failure on one rank is raised on all of them.
Checkpoints may come from elsewhere: nothing in them is unpickled before a check that it names only the plain types of
the format, and no file outside the directory is opened.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata  # noqa: E402

from rlhf_megatron.mcore import rng  # noqa: E402

if TYPE_CHECKING:
    from rlhf_megatron.mcore.engine import MegatronEngine

FORMAT = 1
BACKEND, BACKEND_VERSION = "torch_dist", 1
COMMON, METADATA, CONFIG = "common.pt", ".metadata", "metadata.json"

# Every global that the .metadata of a tensors-only torch_dist checkpoint names; all are plain data types.
_ALLOWED = frozenset(
    {("torch", "Size"), ("torch.serialization", "_get_layout")}
    | {("torch.distributed.checkpoint.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING")}
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
    | {("torch.distributed.checkpoint.planner", name) for name in (
        "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")}
    | {("torch", "float32"), ("torch", "bfloat16")}
)


class CheckpointRefused(ValueError):
    """A checkpoint is incomplete, belongs to another model, or holds what no checkpoint of ours holds."""


class CheckpointNotWritten(OSError):
    """Some rank could not write; raised on all ranks, with each failing rank's reason."""


# ---- saving ----


def save(engine: MegatronEngine, directory: str | Path) -> None:
    """Write the engine's state into `directory` (made if needed; it must not hold a checkpoint). Starts no process.

    Raises:
        CheckpointNotWritten: on every rank, when any rank failed; what was written so far is of no use.
    """
    folder = Path(directory)
    state_folder = folder / "state"
    rank = dist.get_rank()
    with _together("make the directory"):
        if rank == 0:
            state_folder.mkdir(parents=True, exist_ok=True)
            if any(state_folder.iterdir()):
                raise FileExistsError(f"{state_folder} is not empty; save into a fresh directory")
    with engine._entered():
        state = _state(engine, is_loading=False)
        with _together("write the random streams"):
            rng.save(folder / rng.file_name(rank))
        sharded, common = save_preprocess(state, True)
        with _together(f"write {COMMON}"):
            if rank == 0:
                torch.save(common, state_folder / COMMON)
        _Writer(BACKEND, BACKEND_VERSION).save(sharded, state_folder)
    with _together("write engine.json"):
        if rank == 0:
            save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(state_folder))
            with open(folder / "engine.json", "w", encoding="utf-8") as handle:
                json.dump(_description(engine), handle, indent=1)
                handle.flush()
                os.fsync(handle.fileno())


class _Writer(TorchDistSaveShardedStrategy):
    """megatron-core's writer, writing from this process: its own way forks writers and leaves a manager process."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        with _local_results_queue():
            request = self.async_save(sharded_state_dict, checkpoint_dir)
            with _together("write tensors"):
                if request.async_fn is not None:
                    _write(request)
            for finish in request.finalize_fns:
                finish()


@contextlib.contextmanager
def _local_results_queue() -> Iterator[None]:
    """Results are handed over inside this process, by a plain queue. (Two names: it was renamed between versions.)"""
    names = [n for n in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, n)]
    saved = {name: getattr(filesystem_async, name) for name in names}
    results: queue.Queue = queue.Queue()
    try:
        for name in names:
            setattr(filesystem_async, name, lambda *_, **__: results)
        yield
    finally:
        for name, original in saved.items():
            setattr(filesystem_async, name, original)


def _write(request: Any) -> None:
    """Write this rank's buckets, one after the other, and hand over what was written where."""
    results: dict[int, list[Any]] = {}
    transforms = request.async_fn.args[0]
    for index, bucket in enumerate(request.preload_fn()):
        done: queue.Queue = queue.Queue()
        running: queue.Queue = queue.Queue()
        running.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, done, running, True)
        _, outcome = done.get()
        if isinstance(outcome, Exception):
            raise outcome
        results[index] = outcome
    request.async_fn_args[2].put(results)


@contextlib.contextmanager
def _together(what: str, failure: type[Exception] = CheckpointNotWritten) -> Iterator[None]:
    """Run a local part of a collective operation; raise `failure` on all ranks when it failed on one, instead of
    leaving the others waiting for it in the next collective."""
    reason, cause = None, None
    try:
        yield
    except Exception as error:  # reported below, on every rank
        reason, cause = f"{type(error).__name__}: {error}", error
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if failed:
        ranks = "every rank" if len(failed) == len(reasons) else "rank " + ", ".join(map(str, failed))
        texts = dict.fromkeys(reasons[rank] for rank in failed)  # each different text once
        raise failure(f"could not {what} ({ranks}): " + "; ".join(map(str, texts))) from cause


# ---- loading ----


def load(engine: MegatronEngine, directory: str | Path) -> None:
    """Read what `save` wrote into the engine; the parallel layout and the number of ranks may differ.

    The random streams come back exactly under the same layout. Under another one they cannot be told apart any more and
    start afresh from the seed, the step and the rank's place.

    Raises:
        CheckpointRefused: before any weight is changed, when the checkpoint is incomplete, was saved for another model,
            head, dtype or optimizer, or holds anything but plain tensors of this format.
    """
    folder = Path(directory)
    streams = folder / rng.file_name(dist.get_rank())
    with _together("read the checkpoint", CheckpointRefused):
        saved, now = _read_description(folder), _description(engine)
        _compare(saved, now, folder)
        same_layout = {"vpp": 1, "layers": []} | saved["layout"] == now["layout"]  # older ones do not name these
        if same_layout and not streams.is_file():
            raise CheckpointRefused(f"{folder} has no {streams.name}: the checkpoint is incomplete")
        check_files(folder / "state")
    with engine._entered():
        state = _state(engine, is_loading=True)
        with _together("read the checkpoint", CheckpointRefused):
            _check_keys(state, folder / "state")
        loaded = dist_checkpointing.load(state, str(folder / "state"))
        with torch.no_grad():
            missing = [name for index, chunk in enumerate(engine.chunks)
                       for name in chunk.load_state_dict(loaded["model"][str(index)], strict=False).missing_keys
                       if not name.endswith("_extra_state")]
            if missing:
                raise CheckpointRefused(f"{folder} holds no {', '.join(missing)}: it was saved for another model")
            if engine.optimizer is not None:
                engine.optimizer.load_state_dict(loaded["optimizer"])
        engine.step, engine.skipped_steps = saved["step"], saved["skipped_steps"]
        if same_layout:
            rng.load(streams)
        else:
            rng.reseed(engine.seed, engine.step, engine.coordinates)


def check_files(folder: Path) -> None:
    """Refuse a torch_dist directory that could make a loader run code or open other files.

    Raises:
        CheckpointRefused: with the file and what is wrong with it.
    """
    for name in (CONFIG, METADATA, COMMON):
        if not (folder / name).is_file():
            raise CheckpointRefused(f"{folder} has no {name}: the checkpoint is incomplete, or is none of ours")
    backend = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("sharded_backend")
    if backend != BACKEND:
        raise CheckpointRefused(f"{folder / CONFIG} names the format {backend!r}; only {BACKEND!r} is read")
    try:
        torch.load(folder / COMMON, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointRefused(f"{folder / COMMON} holds more than tensors and plain values: {error}") from error
    metadata = _read_metadata(folder / METADATA)
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointRefused(f"{folder / METADATA}: {key!r} is a pickled object, not a tensor; objects are not "
                                    "loaded from checkpoints")
    inside = folder.resolve()
    for index, info in (metadata.storage_data or {}).items():
        name = info.relative_path
        path = folder / name
        if Path(name).name != name or path.resolve().parent != inside:
            raise CheckpointRefused(f"{folder / METADATA}: {index.fqn!r} is in {name!r}, outside the checkpoint")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointRefused(f"{folder / METADATA}: {index.fqn!r} asks for a transform; none is supported")


class _PlainTypes(pickle.Unpickler):
    """Unpickles what names only the types in _ALLOWED."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CheckpointRefused(f"it names {module}.{name}, which is none of the format's plain types")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    try:
        metadata = _PlainTypes(io.BytesIO(path.read_bytes())).load()
    except CheckpointRefused as error:
        raise CheckpointRefused(f"{path} is refused: {error}") from None
    except Exception as error:
        raise CheckpointRefused(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointRefused(f"{path} holds a {type(metadata).__name__}, not checkpoint metadata")
    return metadata


# ---- what is saved ----


def _state(engine: MegatronEngine, is_loading: bool) -> dict[str, Any]:
    """The sharded state of this rank: tensors with their global place, by names that do not depend on the layout."""
    how = {
        "dp_cp_group": engine.groups.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    # Objects (empty "extra states") would be pickled; tensors are all there is to save.
    model = {
        str(index): {name: entry for name, entry in chunk.sharded_state_dict(metadata=how).items()
                     if not isinstance(entry, ShardedObject)}
        for index, chunk in enumerate(engine.chunks)
    }
    state: dict[str, Any] = {"model": model}
    if engine.optimizer is not None:
        for chunk in engine.ddp:
            _count_padding(chunk)
        state["optimizer"] = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=how)
    return state


def _count_padding(ddp: torch.nn.Module) -> None:
    """Make megatron-core's gathered optimizer state keep the padding between buckets.

    It drops that padding, but then finds parameters by offsets that count it: with several buckets (tied embeddings get
    one of their own), everything behind a padded bucket would silently be saved shifted. These sizes are used for
    nothing else.
    """
    for buffer in ddp.buffers:  # type: ignore[attr-defined]  # DDP hides the method behind a list
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _check_keys(state: dict[str, Any], folder: Path) -> None:
    """Every tensor that this rank wants is in the checkpoint (shapes are compared by megatron-core before reading)."""
    held = _read_metadata(folder / METADATA).state_dict_metadata
    wanted = {entry.key for chunk in state["model"].values() for entry in chunk.values()}
    missing = sorted(key for key in wanted if key not in held)
    if missing:
        raise CheckpointRefused(f"{folder} holds no {', '.join(missing)}: it was saved for another model")


def _description(engine: MegatronEngine) -> dict[str, Any]:
    spec, layout = engine.spec, engine.layout
    return {
        "format": FORMAT,
        "head": engine.head,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "optimizer": None if engine.settings is None else engine.settings.name,
        "model": {name: getattr(spec, name) for name in (
            "family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim",
            "vocab_size", "tied")},
        "layout": {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp, "vpp": layout.vpp,
                   "layers": list(layout.layers)},
        "step": engine.step,
        "skipped_steps": engine.skipped_steps,
    }


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    if not path.is_file():
        raise CheckpointRefused(f"{folder} has no engine.json: the checkpoint is incomplete, or is none of ours")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointRefused(f"{path} is damaged: {error}") from error
    if saved.get("format") != FORMAT:
        raise CheckpointRefused(f"{path} has format {saved.get('format')!r}; this version reads {FORMAT}")
    return saved


def _compare(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    keys = ("head", "dtype", "model") if now["optimizer"] is None else ("head", "dtype", "model", "optimizer")
    differences = [f"{key}: saved {saved.get(key)!r}, now {now[key]!r}" for key in keys if saved.get(key) != now[key]]
    if differences:
        raise CheckpointRefused(f"{folder} was saved for another role or model: " + "; ".join(differences))
