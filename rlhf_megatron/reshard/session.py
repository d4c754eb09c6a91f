"""Enter and leave generation: the engine wakes, takes the trainer's weights through the plan, and goes back to
sleep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ..layouts.plan import ReshardPlan
from . import verify
from .execute import Figures, Staging, execute


class WeightsEngine(Protocol):
    """What a session needs of a generation engine."""

    def tensors(self) -> Mapping[str, Tensor]: ...
    def finish_weights(self, changed: list[str]) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def reset_cache(self) -> None: ...


class GenerationSession:
    """`with session: engine.generate(...)`, as often as wanted; every entry brings the engine the weights of that
    moment.

    trainer_tensors: called at each entry, so that weights that moved (offload, new storage) are found. The order
    matters: wake first, then the weights (a wake that restores old weights is overwritten), then what the engine
    derives from them, then the cache. Collective over `group`. check: compare fingerprints after every entry
    (WeightsDiffer names the tensors).
    """

    def __init__(self, trainer_tensors: Callable[[], Mapping[str, Tensor]], plan: ReshardPlan, engine: WeightsEngine,
                 group: dist.ProcessGroup | None = None, check: bool = False) -> None:
        self.trainer_tensors, self.plan, self.engine = trainer_tensors, plan, engine
        self.group, self.check = group, check
        self.figures = Figures()
        self._staging = Staging()
        self._inside = False

    def __enter__(self) -> GenerationSession:
        if self._inside:
            raise RuntimeError("the generation session is entered already; leave it before entering again")
        self.engine.wake()
        try:
            source, target = self.trainer_tensors(), self.engine.tensors()
            self.figures = execute(self.plan, source, target, self.group, staging=self._staging)
            if self.check:
                verify.require_equal(self.plan, source, target, self.group)
            self.engine.finish_weights(list(target))
            self.engine.reset_cache()
        except BaseException:
            self.engine.sleep()  # never leave an engine awake with half the weights
            raise
        self._inside = True
        return self

    def __exit__(self, *error: object) -> None:
        self._inside = False
        self.engine.sleep()
