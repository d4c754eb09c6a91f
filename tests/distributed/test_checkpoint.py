"""Engine checkpoints: the next update after a load equals the one without it, under the same or another layout."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from engines import ACTOR, CRITIC, LinearLoss, example_batch, make_engine, my_rows
from ranks import RanksFailed, run_ranks
from rlhf_megatron.layouts.mcore import MegatronLayout
from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.mcore import checkpoint
from rlhf_megatron.mcore.checkpoint import CheckpointRefused, check_files
from tiny import join, read_out, relative, settings, tiny_spec


def _setup(degrees, head="lm", dtype="float32", name="adam", tied=False, seed=0):
    layout = ParallelLayout.build(dist.get_world_size(), **degrees)
    chosen = settings(name=name, lr=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=2)
    return make_engine(tiny_spec(tied=tied), layout, head, 2, chosen, seed=seed, dtype=dtype)


def _steps(engine, numbers, head):
    exact = engine.dtype == torch.float32
    loss = (ACTOR if exact else LinearLoss()) if head == "lm" else CRITIC
    return [engine.train_step(my_rows(example_batch(seed=n), engine), loss)["grad_norm"].value for n in numbers]


def _save(rank, folder, degrees, *more):
    """Two updates, save, a third update -> weights when saved and after, and the third norm."""
    engine, where = _setup(degrees, *more)
    head = engine.head
    _steps(engine, (0, 1), head)
    saved = read_out(where, rank, engine.tensors())
    engine.save(folder)
    assert not psutil.Process().children(recursive=True), "saving left a process behind"
    norms = _steps(engine, (2,), head)
    return saved, read_out(where, rank, engine.tensors()), norms


def _load(rank, folder, degrees, *more):
    """Other weights first, load, third update -> the same three."""
    engine, where = _setup(degrees, *more, seed=1)
    head = engine.head
    _steps(engine, (5,), head)
    engine.load(folder)
    assert engine.step == 2
    loaded = read_out(where, rank, engine.tensors())
    norms = _steps(engine, (2,), head)
    return loaded, read_out(where, rank, engine.tensors()), norms


def _whole(results, degrees, head, tied):
    where = MegatronLayout(tiny_spec(tied=tied), ParallelLayout.build(len(results), **degrees), head=head)
    return [join(where, [r[i] for r in results], 1e-5) for i in (0, 1)]


ROUTES = [  # (ranks, degrees) saved -> loaded, then head, dtype, optimizer, tied
    ((2, dict(tp=2)), (2, dict()), "lm", "float32", "adam", False),
    ((2, dict(pp=2)), (1, dict()), "lm", "float32", "adam", False),
    ((1, dict()), (4, dict(tp=2)), "lm", "float32", "adam", False),
    ((3, dict()), (4, dict()), "lm", "float32", "adam", False),
    ((2, dict(tp=2)), (2, dict(tp=2)), "lm", "float32", "adam", False),
    ((2, dict(pp=2)), (2, dict(tp=2)), "lm", "float32", "adam", True),
    ((4, dict(pp=2)), (2, dict(pp=2)), "lm", "float32", "adam", True),
    ((2, dict(tp=2)), (2, dict(pp=2)), "value", "float32", "adam", False),
    ((2, dict(tp=2)), (2, dict(pp=2)), "lm", "float32", "sgd", False),
    ((2, dict(tp=2)), (2, dict()), "lm", "bfloat16", "adam", False),
    ((2, dict(pp=2)), (2, dict()), "lm", "bfloat16", "sgd", True),
    ((2, dict(pp=2, vpp=2)), (1, dict()), "lm", "float32", "adam", True),
    ((2, dict(tp=2)), (4, dict(pp=2, vpp=2)), "lm", "float32", "adam", False),
    ((2, dict(pp=2, layers=(3, 1))), (2, dict(pp=2, vpp=2)), "value", "float32", "adam", False),
    ((4, dict(tp=2, cp=2)), (2, dict(pp=2, layers=(1, 3))), "lm", "float32", "adam", True),
    ((2, dict(pp=2, vpp=2)), (2, dict(pp=2, vpp=2)), "lm", "float32", "adam", True),
]


@pytest.mark.parametrize(("old", "new", "head", "dtype", "name", "tied"), ROUTES)
def test_the_next_update_is_the_same_under_any_layout(tmp_path, old, new, head, dtype, name, tied):
    more = (head, dtype, name, tied)
    written = run_ranks(old[0], _save, str(tmp_path), old[1], *more)
    read = run_ranks(new[0], _load, str(tmp_path), new[1], *more)
    saved, saved_next = _whole(written, old[1], head, tied)
    loaded, loaded_next = _whole(read, new[1], head, tied)
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key]), key
    if dtype == "float32":
        assert read[0][2] == pytest.approx(written[0][2], rel=1e-5)
        for key, tensor in saved_next.items():
            assert relative(loaded_next[key], tensor) < (1e-6 if old == new else 1e-5), key
    else:  # the forward pass of bf16 rounds differently under another layout
        assert read[0][2] == pytest.approx(written[0][2], rel=0.02)


def _masters(rank, folder, tp, mode):
    engine, _ = _setup(dict(tp=tp), "lm", "bfloat16", seed=mode == "load")
    if mode == "save":
        _steps(engine, (0, 1), "lm")
        engine.save(folder)
    else:
        engine.load(folder)
    total = {"param": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    inner = engine.optimizer.chained_optimizers[0].optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            assert parameter.dtype == torch.float32
            for key, value in {"param": parameter, **inner.state[parameter]}.items():
                assert value.dtype == torch.float32 and value.isfinite().all(), key
                total[key] += value.double().abs().sum().item()
    return total, [group["step"] for group in inner.param_groups]


def test_masters_and_moments_keep_fp32(tmp_path):
    """Sums over a split that counts no element twice (dp only) agree to fp32; no element is left uninitialised."""
    written = run_ranks(2, _masters, str(tmp_path), 1, "save")
    read = run_ranks(1, _masters, str(tmp_path), 1, "load")
    for key in ("param", "exp_avg", "exp_avg_sq"):
        assert sum(total[key] for total, _ in written) == pytest.approx(read[0][0][key], rel=1e-9)
    assert written[0][1] == read[0][1]
    run_ranks(2, _masters, str(tmp_path), 2, "load")  # one more padded vocabulary row than was saved


# ---- random streams ----


def _draw():
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    drawn = [[random.random() for _ in range(5)], numpy.random.rand(5).tolist(), torch.rand(5).tolist()]
    drawn.append([random.gauss(0, 1), numpy.random.randn()])
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            drawn.append(torch.rand(5).tolist())
    return drawn


def _streams(rank, folder, mode):
    engine, _ = _setup(dict(tp=2))
    random.seed(100 * rank + (mode == "load"))
    numpy.random.seed(100 * rank + (mode == "load"))
    torch.manual_seed(100 * rank + (mode == "load"))
    with engine._entered():
        before = _draw()
    if mode == "save":
        engine.save(folder)
    else:
        engine.load(folder)
    with engine._entered():
        return before, _draw()


def test_every_rank_gets_its_own_random_streams_back(tmp_path):
    written = run_ranks(4, _streams, str(tmp_path), "save")
    read = run_ranks(4, _streams, str(tmp_path), "load")
    for (before, expected), (other, drawn) in zip(written, read, strict=True):
        assert drawn == expected and other[0] != before[0]
    for stream in range(4):
        assert len({str(expected[stream]) for _, expected in written}) == 4, "ranks share a stream"


# ---- refusals ----


class Marker:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save, str(folder), dict(tp=2))
    return folder


def _copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def _refused(rank, folder, tp, changes):
    layout = ParallelLayout.build(dist.get_world_size(), tp)
    engine, where = make_engine(tiny_spec(**changes.pop("spec", {})), layout, optimizer=settings(**changes), seed=1)
    before = [piece[3] for piece in read_out(where, rank, engine.tensors())]
    with pytest.raises(CheckpointRefused) as error:
        engine.load(folder)
    assert all(torch.equal(a, b[3]) for a, b in zip(before, read_out(where, rank, engine.tensors()), strict=True))
    return str(error.value)


@pytest.mark.parametrize("name", ["state/.metadata", "state/common.pt"])
def test_a_pickle_that_runs_code_is_refused(saved, tmp_path, name):
    folder, marker = _copy(saved, tmp_path), tmp_path / "marker"
    if name.endswith(".pt"):
        torch.save({"x": Marker(marker)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Marker(marker)))
    (message,) = run_ranks(1, _refused, str(folder), 1, {})
    assert Path(name).name in message and not marker.exists()


def test_a_pickled_object_among_the_tensors_is_refused(saved, tmp_path):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    folder = _copy(saved, tmp_path)
    path = folder / "state" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    key = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointRefused):
        check_files(folder / "state")


@pytest.mark.parametrize("escape", ["../../other.distcp", "/tmp/other.distcp", "link.distcp"])
def test_a_file_outside_the_checkpoint_is_refused(saved, tmp_path, escape):
    folder = _copy(saved, tmp_path)
    path = folder / "state" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = escape
    path.write_bytes(pickle.dumps(metadata))
    if escape == "link.distcp":
        os.symlink(tmp_path / "elsewhere", folder / "state" / escape)
    with pytest.raises(CheckpointRefused, match="outside the checkpoint"):
        check_files(folder / "state")


def test_an_incomplete_checkpoint_is_refused(saved, tmp_path):
    folder = _copy(saved, tmp_path)
    (folder / "state" / "metadata.json").unlink()
    assert "incomplete" in run_ranks(1, _refused, str(folder), 1, {})[0]
    (folder / "engine.json").unlink()
    assert "incomplete" in run_ranks(1, _refused, str(folder), 1, {})[0]


def test_another_model_or_optimizer_is_refused_before_a_weight_changes(saved):
    assert "num_layers" in run_ranks(1, _refused, str(saved), 1, {"spec": {"num_layers": 2}})[0]
    assert "optimizer: saved 'adam', now 'sgd'" in run_ranks(1, _refused, str(saved), 1, {"name": "sgd"})[0]


def _fails_to_write(rank, folder):
    engine, _ = _setup(dict(tp=2))
    if rank == 1:  # a full disk, seen by one rank only
        def full(*_):
            raise OSError(28, "No space left on device")
        checkpoint._write = full
    with pytest.raises(checkpoint.CheckpointNotWritten, match="rank 1.*No space left"):
        engine.save(folder)
    return True


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path):
    assert all(run_ranks(2, _fails_to_write, str(tmp_path)))
    assert not (tmp_path / "engine.json").exists()


def test_a_directory_with_a_checkpoint_is_not_overwritten(saved):
    before = json.loads((saved / "engine.json").read_text())
    with pytest.raises(RanksFailed, match="not empty"):
        run_ranks(1, _save, str(saved), dict())
    assert json.loads((saved / "engine.json").read_text()) == before
