"""The MILP of the paper, from problem to plan: build, solve, round, re-time, check.

What the solver says is a claim: its binaries are rounded, times are recomputed from the arcs they
switch on, and the plan is checked; where that fails the incumbent stays. See docs/milp.md.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_optpipe.core.check import check
from megatron_optpipe.core.errors import Deadlock, PlanError
from megatron_optpipe.core.op import Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import Orders, plan_from_starts, retime
from megatron_optpipe.planner.backends import SOLVERS
from megatron_optpipe.planner.cuts import add_cuts
from megatron_optpipe.planner.milp_constraints import add_constraints
from megatron_optpipe.planner.milp_model import ConditionalArc, Floats, Model, value_of
from megatron_optpipe.planner.milp_result import SHORTER_MS, MilpResult, warned
from megatron_optpipe.planner.milp_variables import Reductions, Variables
from megatron_optpipe.planner.milp_windows import NothingBelow
from megatron_optpipe.planner.network import Cycle, Network

MAX_COLUMNS = 60_000
"""More 0/1 variables than this take longer to write down than to give up on."""


@dataclass(frozen=True, slots=True)
class MilpOptions:
    """How to solve."""

    reductions: Reductions = field(default_factory=Reductions)
    mip_gap: float = 0.0
    backend: str = "auto"
    """``auto``: CP-SAT where it is installed (``settle``), else scipy; ``scipy``; ``cp-sat``;
    ``inline``: scipy in this process, for tests."""


def build(
    problem: Problem,
    horizon_ms: float,
    reductions: Reductions,
    incumbent: Plan | None = None,
    free: Collection[Op] | None = None,
) -> Variables:
    """The whole model below ``horizon_ms``. Raises ``NothingBelow``."""
    variables = Variables(problem, horizon_ms, reductions, incumbent, free)
    add_constraints(variables)
    add_cuts(variables)
    if variables.model.impossible:
        raise NothingBelow("the memory limits leave no plan below the horizon")
    return variables


def solve(
    problem: Problem,
    incumbent: Plan | None,
    time_limit_s: float,
    options: MilpOptions | None = None,
) -> MilpResult:
    """Minimise the makespan over all plans; ``incumbent`` gives the horizon.

    The plan returned is shorter than the incumbent, or None.
    """
    options = options or MilpOptions()
    begun = time.monotonic()
    horizon = incumbent.makespan_ms if incumbent is not None else _enough_ms(problem)
    size = _most_columns(problem)
    if size > MAX_COLUMNS:
        return MilpResult(None, None, f"skipped: up to {size} variables, at most {MAX_COLUMNS}")
    try:
        variables = build(problem, horizon, options.reductions)
    except NothingBelow:
        if incumbent is not None:
            return warned("failed: the model excludes the plan in hand")
        return MilpResult(None, None, "infeasible")
    left = time_limit_s - (time.monotonic() - begun)
    result = _solve_model(problem, variables, left, options, feasible=incumbent is not None)
    if (
        incumbent is not None
        and result.plan is not None
        and (result.plan.makespan_ms >= incumbent.makespan_ms - SHORTER_MS)
    ):
        result = MilpResult(None, result.lower_bound_ms, result.status, result.nodes)
    return result


def improve_window(
    problem: Problem,
    incumbent: Plan,
    free_ops: Collection[Op],
    time_limit_s: float,
    options: MilpOptions | None = None,
) -> Plan | None:
    """Re-decide the places of ``free_ops``; all other ops keep their order among themselves.

    O(s,j) among them (whether the incumbent has it or not): also whether (s,j) is offloaded at
    all. Small windows pay: some 70 compute ops without transfers, 30 with. Returns a shorter
    valid plan, or None.
    """
    options = options or MilpOptions()
    begun = time.monotonic()
    horizon = incumbent.makespan_ms * (1 - 1e-5)
    try:
        variables = build(problem, horizon, options.reductions, incumbent, free_ops)
    except NothingBelow:
        return None
    left = time_limit_s - (time.monotonic() - begun)
    if left <= 0.3 or len(variables.model.lower) > MAX_COLUMNS:
        return None
    plan = _solve_model(problem, variables, left, options, feasible=False).plan
    if plan is None or plan.makespan_ms >= incumbent.makespan_ms - SHORTER_MS:
        return None
    return plan


def _solve_model(
    problem: Problem,
    variables: Variables,
    time_limit_s: float,
    options: MilpOptions,
    *,
    feasible: bool,
) -> MilpResult:
    begun = time.monotonic()
    arrays = variables.model.arrays(variables.makespan)
    solver = SOLVERS[options.backend if options.backend in SOLVERS else "scipy"]
    answer = solver(arrays, time_limit_s, mip_gap=options.mip_gap)
    if answer.status == "infeasible" and feasible:
        # A plan exists, so the claim is false; presolve is the usual culprit.
        left = time_limit_s - (time.monotonic() - begun)
        answer = solver(arrays, left, mip_gap=options.mip_gap, presolve=False)
        if answer.status == "infeasible":
            return warned("failed: infeasible, although a plan exists")
    if answer.failed:
        return warned(answer.status)
    if answer.x is None and answer.status == "time limit" and feasible:
        return warned("time limit without a solution")
    bound = None
    if answer.bound is not None:
        bound = max(0.0, answer.bound * (1 - 1e-6) / variables.scale)
    plan = None
    if answer.x is not None:
        plan = plan_of(problem, variables.network, variables.model, variables, answer.x)
        if plan is None:
            return warned("failed: the rounded solution is no valid plan")
    return MilpResult(plan, bound, answer.status, answer.nodes)


def plan_of(
    problem: Problem, network: Network, model: Model, variables: Variables, x: Floats
) -> Plan | None:
    """The plan of a solution: earliest times under the arcs that its binaries switch on."""
    there = [value_of(variables.is_away(i), x) for i in range(len(network.ops))]
    needs: list[list[ConditionalArc]] = [[] for _ in network.ops]
    waiting = [0] * len(network.ops)
    following: list[list[int]] = [[] for _ in network.ops]
    for arc in model.arcs:
        if there[arc.a] and there[arc.b] and all(value_of(lit, x) for lit in arc.literals):
            needs[arc.b].append(arc)
            following[arc.a].append(arc.b)
            waiting[arc.b] += 1
    start = [0.0] * len(network.ops)
    order = [i for i, count in enumerate(waiting) if not count]
    for i in order:
        for arc in needs[i]:
            lasts = network.duration_ms[arc.a] if arc.from_end else 0.0
            start[i] = max(start[i], start[arc.a] + lasts + arc.lag_ms)
        for b in following[i]:
            waiting[b] -= 1
            if not waiting[b]:
                order.append(b)
    if len(order) < len(network.ops):
        return None
    starts = {op: start[i] for i, op in enumerate(network.ops) if there[i]}
    place = {network.ops[i]: k for k, i in enumerate(order)}
    try:
        plan = plan_from_starts(problem, _orders(problem, starts, place), starts, "milp")
        if check(problem, plan):
            return None
        tidy = retime(problem, plan)
    except (Deadlock, PlanError, Cycle):
        return None
    return plan if check(problem, tidy) or tidy.makespan_ms > plan.makespan_ms else tidy


def _orders(problem: Problem, start: dict[Op, float], place: dict[Op, int]) -> Orders:
    lanes: dict[str, list[list[Op]]] = {
        kind: [[] for _ in problem.devices] for kind in ("compute", "O", "R")
    }
    for op in sorted(start, key=place.__getitem__):  # the ops of a lane are ordered by arcs
        kind = op.kind if op.kind in "OR" else "compute"
        lanes[kind][problem.device_of(op.stage)].append(op)
    compute, offload, reload = (
        tuple(tuple(lane) for lane in lanes[kind]) for kind in ("compute", "O", "R")
    )
    return Orders(compute, offload, reload)


def _most_columns(problem: Problem) -> int:
    """About how many orders may be open before any is fixed."""
    total = 0
    for d in range(problem.num_devices):
        stages = problem.stages_on(d)
        compute = 3 * len(stages) * problem.num_microbatches
        moves = 2 * sum(problem.can_offload(s) for s in stages) * problem.num_microbatches
        total += compute * (compute - 1) // 3 + moves * compute
    return total


def _enough_ms(problem: Problem) -> float:
    """A horizon that some optimal plan keeps: everything one after another."""
    network = Network.of_compute(problem)
    total = sum(network.duration_ms) + sum(lag for _, _, lag in network.arcs)
    for s in range(problem.num_stages):
        if problem.can_offload(s):
            one = sum(problem.duration_ms(Op(kind, s, 0)) for kind in "OR")
            total += one * problem.num_microbatches
    return total
