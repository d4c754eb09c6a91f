"""Weights in motion: carry out plans, read and write HF directories, enter generation, verify.

`reshard.execute.execute` carries out a plan; it is not lifted here, where it would hide its module.
"""

from .execute import Execution, Figures, ReshardError, Staging, execute_local
from .files import CheckpointError, load_hf, save_hf
from .session import GenerationSession
from .verify import WeightsDiffer, compare, fingerprint, require_equal

__all__ = ["CheckpointError", "Execution", "Figures", "GenerationSession", "ReshardError", "Staging", "WeightsDiffer",
           "compare", "execute_local", "fingerprint", "load_hf", "require_equal", "save_hf"]
