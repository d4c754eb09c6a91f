"""Offloaded and brought back, an engine computes to the bit what it computes without, and every reference holds."""

import mmap

import pytest
import torch
import torch.distributed as dist

from engines import ACTOR, CRITIC, LinearLoss, example_batch, make_engine, my_rows
from ranks import run_ranks
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.layouts.spec import ParallelLayout
from rlhf_megatron.mcore import offload
from rlhf_megatron.mcore.offload import PARTS
from rlhf_megatron.workers.base import MethodSpec, RankContext
from rlhf_megatron.workers.residency import Residency
from tiny import settings, tiny_spec

NOTHING = dict.fromkeys(PARTS, 0)


def _engine(tp=1, pp=1, head="lm", dtype="float32", name="adam", tied=False, vpp=1, overlap=False, seed=0,
            trainable=True):
    layout = ParallelLayout.build(dist.get_world_size(), tp, pp, vpp=vpp)
    chosen = settings(name=name, lr=1e-3, weight_decay=0.1)
    return make_engine(tiny_spec(tied=tied), layout, head, 2, chosen, seed=seed, dtype=dtype, trainable=trainable,
                       overlap=overlap)[0]


def _update(engine, seed):
    loss = CRITIC if engine.head == "value" else ACTOR if engine.dtype == torch.float32 else LinearLoss()
    return engine.train_step(my_rows(example_batch(seed=seed), engine), loss)["grad_norm"].value


def _state(engine):
    """Every tensor that an update reads or writes, by name; views, not copies."""
    found = {f"parameter {name}": parameter.detach() for name, parameter in engine._named_parameters()}
    for n, part in enumerate(engine.optimizer.chained_optimizers):
        if part.is_stub_optimizer:
            continue
        for g, group in enumerate(part.optimizer.param_groups):
            for i, main in enumerate(group["params"]):
                found[f"main {n} {g} {i}"] = main.detach()
                found.update({f"{key} {n} {g} {i}": v for key, v in part.optimizer.state[main].items()})
    return found


def _assert_equal(engine, other):
    ours, exact = _state(engine), _state(other)
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(ours[name], tensor), name


# ---- training ----


def _train(rank, *case):
    """Three updates; one engine is away before and after each of them, and scores in between."""
    offload.CHUNK = 10_000  # storages that lie on several host buffers, and host buffers that hold several
    plain, moved = _engine(*case), _engine(*case)
    full = moved.resident_bytes()
    assert full == plain.resident_bytes() and full["parameters"] and full["gradients"]
    tensors = _state(moved) | {f"gradient {n}": p.main_grad for n, p in moved._named_parameters()}
    for seed in range(3):
        moved.offload(*PARTS)
        moved.offload(*PARTS)
        assert moved.resident_bytes() == NOTHING and moved.storages.bytes_away() == sum(full.values())
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors.values())
        scores = [engine.forward(my_rows(example_batch(), engine)) for engine in (plain, moved)]
        assert moved.resident_bytes() == NOTHING | {"parameters": full["parameters"]}
        if scores[0] is not None:
            name = scores[0].names()[0]
            assert torch.equal(scores[0][name].values, scores[1][name].values)
        assert _update(plain, seed) == _update(moved, seed)
        assert moved.resident_bytes() == full and moved.storages.bytes_away() == 0
        _assert_equal(moved, plain)
    return full


CASES = [  # ranks, tp, pp, head, dtype, optimizer, tied, vpp, overlapped communication
    (2, 1, 2, "lm", "float32", "adam", True, 2, False),
    (4, 1, 2, "lm", "bfloat16", "adam", False, 2, True),
    (1, 1, 1, "lm", "float32", "adam", True),
    (2, 1, 1, "lm", "float32", "adam", False),
    (2, 1, 1, "lm", "bfloat16", "adam", False),
    (2, 1, 1, "value", "bfloat16", "adam", False),
    (2, 1, 1, "lm", "float32", "sgd", False),
    (2, 1, 1, "lm", "bfloat16", "sgd", True),
    (2, 1, 2, "lm", "bfloat16", "adam", True),
    (4, 2, 2, "lm", "float32", "adam", False),
    (4, 2, 2, "value", "float32", "adam", False),
    (4, 1, 2, "lm", "float32", "adam", True),
    (4, 2, 2, "lm", "bfloat16", "sgd", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_updates_are_the_same_to_the_bit(case):
    full = run_ranks(case[0], _train, *case[1:])[0]
    # fp32 masters are the parameters, or lie in their buffer; plain SGD has nothing else
    assert (full["optimizer"] == 0) == (case[5] == "sgd" and case[4] == "float32")


# ---- references ----


def _references(rank, dtype):
    engine = _engine(dtype=dtype)
    _update(engine, 0)
    taken, (buffer,) = _state(engine), engine.ddp[0].buffers
    name, parameter = next(iter(engine.model.named_parameters()))
    start, end, _ = buffer.param_index_map[parameter]
    views = {**taken, "tensors()": engine.tensors()[name], "buffer": buffer.param_data[start:end]}
    before = {key: view.clone() for key, view in views.items()}
    engine.offload(*PARTS)
    assert all(view.untyped_storage().nbytes() == 0 for view in views.values())
    engine.reload(*PARTS)
    engine.reload(*PARTS)
    for key, view in views.items():
        assert torch.equal(view, before[key]), key
    assert all(not p.main_grad.any() for p in engine.model.parameters())
    # one storage still: what is written through one is read through all others
    again = _state(engine)
    for key, view in taken.items():
        assert view.data_ptr() == again[key].data_ptr(), key
    assert views["tensors()"].data_ptr() == views["buffer"].data_ptr() == parameter.data_ptr()
    views["buffer"].fill_(3.0)
    assert (parameter == 3.0).all() and (engine.tensors()[name] == 3.0).all()
    buffer.grad_data.fill_(5.0)
    assert (parameter.main_grad == 5.0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_references_taken_before_see_the_values_and_share_the_storage(dtype):
    run_ranks(2, _references, dtype)


# ---- a part at a time, and what must not be ----


def _parts(rank):
    engine = _engine(dtype="bfloat16")
    full = engine.resident_bytes()
    for part in PARTS:
        engine.offload(part)
        assert engine.resident_bytes() == full | {part: 0}
        engine.reload(*(other for other in PARTS if other != part))
        assert engine.resident_bytes() == full | {part: 0}
        engine.reload(part)
        assert engine.resident_bytes() == full
    engine.offload("parameters")
    with pytest.raises(ValueError, match="'weights' cannot be offloaded: name one or more of parameters"):
        engine.offload("weights")
    with pytest.raises(ValueError, match="'grads'"):
        engine.reload("grads")
    assert engine.tensors().keys() and engine.resident_bytes() == full  # a method never meets freed memory
    engine.offload(*PARTS)
    engine.weights_loaded()
    assert engine.resident_bytes() == full | {"gradients": 0}
    frozen = _engine(trainable=False)
    size = frozen.resident_bytes()
    assert size["parameters"] and size == NOTHING | {"parameters": size["parameters"]}
    frozen.offload(*PARTS)
    assert frozen.resident_bytes() == NOTHING
    mapped = torch.frombuffer(mmap.mmap(-1, 37 * 32 * 4), dtype=torch.float32)
    frozen.model.output_layer.weight.data = mapped.view(37, 32)
    frozen.reload("parameters")
    with pytest.raises(RuntimeError, match="parameters: a storage of 4736 bytes is mapped or shared"):
        frozen.offload("parameters")
    assert frozen.resident_bytes() == size  # refused before anything was freed


def test_a_part_at_a_time_and_wrong_names():
    run_ranks(1, _parts)
    field = ActorConfig.__dataclass_fields__["offload"]
    assert field.metadata["choices"] == PARTS


# ---- checkpoints ----


def _checkpoints(rank, folder, dtype):
    engine = _engine(dtype=dtype)
    _update(engine, 0)
    engine.save(f"{folder}/here")
    engine.offload(*PARTS)
    engine.save(f"{folder}/away")
    assert engine.resident_bytes()["gradients"] == 0
    other = _engine(dtype=dtype, seed=1)
    _update(other, 5)
    other.offload(*PARTS)
    other.load(f"{folder}/away")
    _assert_equal(other, engine)
    other.offload(*PARTS)  # what loading put in the place of older state is moved, too
    assert other.resident_bytes() == NOTHING
    assert _update(other, 1) == _update(engine, 1)
    _assert_equal(other, engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_saved_and_loaded_while_away(tmp_path, dtype):
    run_ranks(2, _checkpoints, str(tmp_path), dtype)
    files = list((tmp_path / "here").rglob("*.distcp"))
    assert len(files) > 1
    for file in files:
        assert file.read_bytes() == (tmp_path / "away" / "state" / file.name).read_bytes()


# ---- phases ----


def _phases(rank):
    context = RankContext(rank=rank, size=2, pool="main", job_rank=rank, seed=0)
    residency = Residency.of(context)
    assert residency is Residency.of(context)
    actor, critic, reference = _engine(), _engine(head="value"), _engine(trainable=False)
    residency.add("actor", actor, PARTS)
    assert actor.resident_bytes() == NOTHING, "away while the other roles are built"
    residency.add("critic", critic, ("optimizer", "gradients"))
    residency.add("reference", reference, ("parameters",))
    seen, moved = {}, []

    def bring_back(away):
        moved.append(away)
        real(away)

    real, offload._Away.back = offload._Away.back, bring_back

    def phase(role, name, needs=("parameters",), split="train"):
        with residency.phase(role, MethodSpec(name, split=split, needs=needs)):
            engines = {"actor": actor, "critic": critic, "reference": reference}
            seen[role, name] = {r: {p for p, size in e.resident_bytes().items() if size} for r, e in engines.items()}
            return residency.report(dist.group.WORLD) if name == "update" else None

    phase("actor", "generate", split="generate")
    phase("reference", "log_probs")
    phase("critic", "values")
    phase("critic", "save", ("parameters", "optimizer"), None)
    critics = phase("critic", "update", None)
    actors = phase("actor", "update", None)
    count = len(moved)
    again = phase("actor", "update", None)
    assert len(moved) == count, "something moved between two mini-batches"
    weights, all_of_it = {"parameters"}, set(PARTS)
    assert seen == {
        ("actor", "generate"): {"actor": weights, "critic": weights, "reference": set()},
        ("reference", "log_probs"): {"actor": set(), "critic": weights, "reference": weights},
        ("critic", "values"): {"actor": set(), "critic": weights, "reference": set()},
        ("critic", "save"): {"actor": set(), "critic": {"parameters", "optimizer"}, "reference": set()},
        ("critic", "update"): {"actor": set(), "critic": all_of_it, "reference": set()},
        ("actor", "update"): {"actor": all_of_it, "critic": weights, "reference": set()},
    }
    peak = "perf/memory_peak_mb"
    assert critics.keys() == {f"{peak}_{phase}" for phase in (
        "actor_generate", "reference_log_probs", "critic_values", "critic_update")} | {peak, "perf/memory_offloaded_mb"}
    assert actors.keys() == again.keys() == {f"{peak}_actor_update", peak, "perf/memory_offloaded_mb"}
    with pytest.raises(KeyError), residency.phase("critic", MethodSpec("values", split="train", needs=("parameters",))):
        raise KeyError("a call that fails is no measurement")
    assert f"{peak}_critic_values" not in residency.report(dist.group.WORLD)
    return {name: metric.value for name, metric in critics.items()}


def test_a_phase_has_what_it_needs_and_nothing_moves_between_mini_batches():
    one, other = run_ranks(2, _phases)
    assert one == other, "the replica's maximum, on every rank"
    assert one["perf/memory_offloaded_mb"] > 0.1
    assert one["perf/memory_peak_mb"] == max(v for name, v in one.items() if "_peak_mb_" in name) > 10
