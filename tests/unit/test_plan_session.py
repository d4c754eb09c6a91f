"""Entering generation: the engine always samples with the trainer's weights of that moment."""

from __future__ import annotations

import pytest
import torch

from model_cases import canonical_weights, empty_like, scatter, spec
from rlhf_megatron.layouts import HFLayout, MegatronLayout, ParallelLayout, make_plan
from rlhf_megatron.reshard import GenerationSession, ReshardError, WeightsDiffer


class Engine:
    """Stashes its weights on sleep and restores them on wake, as engines with a sleep mode do."""

    def __init__(self, layout):
        self.weights, self.calls, self.stash = empty_like(layout, 0), [], None

    def tensors(self):
        return self.weights

    def sleep(self):
        self.calls.append("sleep")
        self.stash = {name: tensor.clone() for name, tensor in self.weights.items()}

    def wake(self):
        self.calls.append("wake")
        for name, tensor in (self.stash or {}).items():
            self.weights[name].copy_(tensor)

    def finish_weights(self, changed):
        self.calls.append("finish")
        assert sorted(changed) == sorted(self.weights)

    def reset_cache(self):
        self.calls.append("reset")


@pytest.fixture
def case():
    model = spec()
    layout, copy = MegatronLayout(model, ParallelLayout()), HFLayout(model, 1)
    return make_plan(layout, copy), scatter(layout, canonical_weights(model))[0], Engine(copy)


def test_a_wake_that_restores_old_weights_does_not_win(case):
    plan, trainer, engine = case
    session = GenerationSession(lambda: trainer, plan, engine, check=True)
    for _ in range(3):
        for tensor in trainer.values():
            tensor += 1
        with session:
            assert torch.equal(engine.weights["model.norm.weight"], trainer["decoder.final_layernorm.weight"])
            assert session.figures.copied == sum(tensor.nbytes for tensor in engine.weights.values())
    assert engine.calls == ["wake", "finish", "reset", "sleep"] * 3


def test_the_engine_sleeps_after_an_error_inside_or_on_the_way_in(case):
    plan, trainer, engine = case
    session = GenerationSession(lambda: trainer, plan, engine)
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    del trainer["decoder.final_layernorm.weight"]
    with pytest.raises(ReshardError, match="missing tensors decoder.final_layernorm.weight"), session:
        pass
    assert engine.calls == ["wake", "finish", "reset", "sleep", "wake", "sleep"]


def test_a_session_is_not_entered_twice(case):
    plan, trainer, engine = case
    session = GenerationSession(lambda: trainer, plan, engine)
    with session, pytest.raises(RuntimeError, match="entered already"):
        session.__enter__()


def test_the_check_names_weights_that_did_not_arrive(case, monkeypatch):
    plan, trainer, engine = case
    monkeypatch.setattr("rlhf_megatron.reshard.session.execute", lambda *args, **kwargs: None)
    with pytest.raises(WeightsDiffer, match="model.embed_tokens.weight"), GenerationSession(
            lambda: trainer, plan, engine, check=True):
        pass


def test_storage_shared_with_the_trainer_is_left_alone(case):
    plan, trainer, engine = case
    engine.weights["model.norm.weight"] = trainer["decoder.final_layernorm.weight"]
    session = GenerationSession(lambda: trainer, plan, engine)
    with session:
        copied = sum(t.nbytes for t in engine.weights.values()) - engine.weights["model.norm.weight"].nbytes
        assert session.figures.copied == copied
