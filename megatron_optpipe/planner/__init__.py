"""Plans pipeline iterations: order, offload and memory decided together. Needs no torch."""

from megatron_optpipe.planner.api import METHODS, make_plan
from megatron_optpipe.planner.feasible import Infeasible
from megatron_optpipe.planner.options import PlannerOptions

__all__ = ["METHODS", "Infeasible", "PlannerOptions", "make_plan"]
