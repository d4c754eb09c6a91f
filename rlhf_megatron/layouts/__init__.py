"""One algebra for every layout: canonical tensors, boxes, placements, families and plans. No torch here."""

from .boxes import Box, Layout, Placement
from .families import FAMILIES, ModelFamily, family_for, family_of
from .hf import HFLayout, read_config, read_spec
from .mcore import MegatronLayout
from .plan import PlanError, ReshardPlan, make_plan
from .spec import Coordinates, ModelSpec, ParallelLayout, padded_vocab

__all__ = ["FAMILIES", "Box", "Coordinates", "HFLayout", "Layout", "MegatronLayout", "ModelFamily", "ModelSpec",
           "ParallelLayout", "Placement", "PlanError", "ReshardPlan", "family_for", "family_of", "make_plan",
           "padded_vocab", "read_config", "read_spec"]
