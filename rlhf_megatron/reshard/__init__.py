"""Weights in motion: carry out plans, read and write HF directories, enter generation, verify."""

from .execute import Execution, Figures, ReshardError, Staging, execute, execute_local
from .files import CheckpointError, load_hf, save_hf
from .session import GenerationSession
from .verify import WeightsDiffer, compare, fingerprint, require_equal

__all__ = ["CheckpointError", "Execution", "Figures", "GenerationSession", "ReshardError", "Staging", "WeightsDiffer",
           "compare", "execute", "execute_local", "fingerprint", "load_hf", "require_equal", "save_hf"]
