"""The learning rate of every update."""

from types import SimpleNamespace

import pytest

from rlhf_megatron.mcore.optimizer import learning_rate


def rates(total, **changes):
    settings = SimpleNamespace(**{**dict(lr=1.0, min_lr=0.0, schedule="constant", warmup_steps=0), **changes})
    return [round(learning_rate(settings, step, total), 6) for step in range(total + 2)]


def test_constant_and_warmup():
    assert rates(4) == [1.0] * 6
    assert rates(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_the_minimum_and_stay():
    assert rates(4, schedule="linear", min_lr=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(4, schedule="cosine") == [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_all_warmup_and_unknown_names():
    assert rates(2, schedule="cosine", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match="schedule='step'"):
        rates(2, schedule="step")
