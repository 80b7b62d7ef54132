"""Small problems to the end: bound, exact search, solver, until the optimum is proven.

``auto`` calls this for problems that are small for the solver at hand: CP-SAT where OR-Tools is
installed, else the MILP. Larger ones are searched.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner import cpsat
from megatron_optpipe.planner.bound import Bound, lower_bound
from megatron_optpipe.planner.exact import solve_exactly
from megatron_optpipe.planner.milp import MilpOptions, solve

MAX_OPS = 96
"""3 kinds x stages x microbatches up to which the MILP pays (4 x 8)."""
MAX_CPSAT_OPS, MAX_CPSAT_OFFLOAD_OPS = 450, 150
"""The same for CP-SAT: 8 x 16 without offload, 4 x 12 with."""
MAX_SEARCH_OPS = 60
SEARCH_STATES = 1500
"""Partial plans of the exact search before the MILP takes over (about 0.4 s)."""
EQUAL = 2e-5
"""Relative gap that counts as none: what a solver's tolerances leave open."""


class Settled(NamedTuple):
    """The best plan known, a proven bound, and how it ended (``optimal``, ``time limit``...)."""

    plan: Plan
    bound: Bound
    status: str


def is_small(problem: Problem) -> bool:
    """Whether ``settle`` is worth calling."""
    ops = 3 * problem.num_stages * problem.num_microbatches
    if not cpsat.available():
        return ops <= MAX_OPS
    moves = any(problem.can_offload(s) for s in range(problem.num_stages))
    return ops <= (MAX_CPSAT_OFFLOAD_OPS if moves else MAX_CPSAT_OPS)


def settle(
    problem: Problem,
    incumbent: Plan,
    time_limit_s: float,
    options: MilpOptions | None = None,
    search_states: int = SEARCH_STATES,
) -> Settled:
    """Improve ``incumbent`` until it is proven optimal or the time is up."""
    begun = time.monotonic()
    best = incumbent
    bound = lower_bound(problem, min(1.0, 0.3 * time_limit_s), best.makespan_ms)
    if _closed(best, bound):
        return Settled(best, bound, "optimal")
    left = time_limit_s - (time.monotonic() - begun)
    ops = 3 * problem.num_stages * problem.num_microbatches
    states = search_states if ops <= MAX_SEARCH_OPS else 0
    found = solve_exactly(problem, best, min(left, 0.3 * time_limit_s), states)
    best = found.plan or best
    if found.proven:
        return Settled(best, Bound(best.makespan_ms * (1 - 1e-6), "exact search"), "optimal")
    left = time_limit_s - (time.monotonic() - begun)
    if left < 0.6:
        return Settled(best, bound, "time limit")
    options = options or MilpOptions()
    use_cpsat = options.backend == "cp-sat" or (options.backend == "auto" and cpsat.available())
    if use_cpsat:
        answer = cpsat.solve(problem, best, left, lower_ms=bound.ms, mip_gap=options.mip_gap)
    else:
        answer = solve(problem, best, 0.6 * left, options)
    best = answer.plan or best
    if answer.lower_bound_ms is not None and answer.lower_bound_ms > bound.ms:
        bound = Bound(
            min(answer.lower_bound_ms, best.makespan_ms), "CP-SAT" if use_cpsat else "MILP"
        )
    if _closed(best, bound) or ops > MAX_SEARCH_OPS:
        return Settled(best, bound, "optimal" if _closed(best, bound) else answer.status)
    left = time_limit_s - (time.monotonic() - begun)
    found = solve_exactly(problem, best, left)
    best = found.plan or best
    if found.proven:
        return Settled(best, Bound(best.makespan_ms * (1 - 1e-6), "exact search"), "optimal")
    return Settled(
        best, bound, "time limit" if not answer.status.startswith("fail") else answer.status
    )


def _closed(plan: Plan, bound: Bound) -> bool:
    return bound.ms >= plan.makespan_ms * (1 - EQUAL)
