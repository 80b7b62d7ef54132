"""The whole planner in turn: classic orders, AdaOffload, then exact solving or search, and a bound.

What comes back is never worse than the best classic order that fits, nor than AdaOffload.
"""

from __future__ import annotations

import dataclasses
import time

from megatron_optpipe.core.errors import Deadlock, OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import time_orders
from megatron_optpipe.planner.adaoffload import adaoffload
from megatron_optpipe.planner.bound import lower_bound, work_bound
from megatron_optpipe.planner.listsched import compiled_for
from megatron_optpipe.planner.milp import MilpOptions
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from megatron_optpipe.planner.search import search_plans
from megatron_optpipe.planner.settle import is_small, settle

_SEARCH_SHARE_SMALL, _SEARCH_SHARE, _CUT_SHARE = 0.25, 0.8, 0.6
_STARTS = 2
"""So many of the known plans are given to the search to improve."""
_FEW_CLASSICS_OPS, _FEW_CLASSICS = 60_000, ("1f1b", "zb-h1")
"""Above so many ops only these classic orders are worth their time."""
_BOUND_SHARE, _BOUND_MOST_S = 0.1, 3.0
_LARGE_OPS = 5_000
"""From so many compute ops on, the compiled scheduler is worth loading for the first plan."""
_FINISH_S_PER_OP = 9e-5
"""What making, bounding and checking the final plan takes for each compute op."""


def incumbents(
    problem: Problem, *, compiled: bool = False, time_limit_s: float = float("inf")
) -> list[Plan]:
    """AdaOffload and the classic orders that fit. Raises ``Infeasible``."""
    plans = [adaoffload(problem, compiled=compiled, time_limit_s=time_limit_s)]
    large = 3 * problem.num_stages * problem.num_microbatches > _FEW_CLASSICS_OPS
    for name, orders in CLASSIC_ORDERS.items():
        if large and name not in _FEW_CLASSICS:
            continue
        try:
            plans.append(time_orders(problem, orders(problem), method=name))
        except (Deadlock, OptPipeError):
            continue  # does not fit, or is not made for this placement
    return plans


def shortest(problem: Problem, plans: list[Plan]) -> Plan:
    """The shortest plan; of equally long ones the one that moves least."""

    def rank(plan: Plan) -> tuple[float, int]:
        moved = sum(
            problem.stages[op.stage].wire_bytes for d in plan.devices for op, _ in d.offload
        )
        return round(plan.makespan_ms, 6), moved

    return min(plans, key=rank)


def searched(problem: Problem, options: PlannerOptions, earlier: Plan | None = None) -> Plan:
    """The best of the incumbents and a search. Raises ``Infeasible``.

    ``earlier``: a valid plan to improve as well, such as that of a similar problem, timed again.
    """
    return _searched(problem, options, options.time_limit_s, earlier)


def _searched(
    problem: Problem, options: PlannerOptions, limit_s: float, earlier: Plan | None
) -> Plan:
    """``options.time_limit_s`` says how much to search, ``limit_s`` when all of it must end."""
    ops = 3 * problem.num_stages * problem.num_microbatches
    deadline_s = time.monotonic() + max(0.0, limit_s - ops * _FINISH_S_PER_OP)
    compiled = ops > _LARGE_OPS and compiled_for(options.time_limit_s)
    known = incumbents(problem, compiled=compiled, time_limit_s=limit_s)
    if earlier is not None:
        known.append(earlier)
    starts = sorted(known, key=lambda plan: plan.makespan_ms)[:_STARTS]
    return shortest(problem, [*search_plans(problem, options, deadline_s, starts), *known])


def auto(problem: Problem, options: PlannerOptions, earlier: Plan | None = None) -> Plan:
    """Everything, within the time limit. Raises ``Infeasible``. ``earlier``: see ``searched``."""
    began = time.monotonic()
    small = is_small(problem)
    share = _SEARCH_SHARE_SMALL if small else _SEARCH_SHARE
    budget = dataclasses.replace(options, time_limit_s=options.time_limit_s * share)
    # The counted work fills part of its share; the clock cuts in late, if at all.
    cut_s = options.time_limit_s * (_CUT_SHARE if small else 1.0)
    best = _searched(problem, budget, cut_s, earlier)
    left = options.time_limit_s - (time.monotonic() - began)
    if small:
        settled = settle(problem, best, left, MilpOptions(mip_gap=options.mipgap))
        best, bound, status = settled.plan, settled.bound, settled.status
    else:
        most = min(_BOUND_MOST_S, _BOUND_SHARE * options.time_limit_s)
        ops = 3 * problem.num_stages * problem.num_microbatches
        hurry = left < ops * _FINISH_S_PER_OP / 2
        bound = work_bound(problem) if hurry else lower_bound(problem, most, best.makespan_ms)
        status = "searched"
    return dataclasses.replace(
        best,
        lower_bound_ms=min(bound.ms, best.makespan_ms),
        solver_status=f"{status}; bound: {bound.reason}",
    )
