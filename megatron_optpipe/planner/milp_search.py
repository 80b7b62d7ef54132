"""The MILP for problems of any size: the whole model where it may end, then one window at a time.

A window frees the ops that start in some stretch of time, on all devices or on some neighbours,
sometimes with the offload choices of its forwards; the rest of the plan keeps its order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from megatron_optpipe.core.op import COMPUTE, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.milp import MilpOptions, improve_window, solve
from megatron_optpipe.planner.milp_result import MilpResult

WHOLE_OPS = 150
"""Compute ops up to which the whole model is tried first."""
WHOLE_SHARE = 0.6
MOST_OPS = 1_500
"""Compute ops above which even a window takes too long to write down."""
WINDOW_S = 5.0
WINDOW_OPS = (30, 50, 70)
OFFLOADS = 6
"""At most so many offload choices are open in one window."""


def search_milp(
    problem: Problem,
    incumbent: Plan,
    time_limit_s: float,
    *,
    seed: int = 0,
    options: MilpOptions | None = None,
) -> MilpResult:
    """Improve ``incumbent`` until the time is up; the plan is None where nothing shorter came."""
    deadline = time.monotonic() + time_limit_s
    best, bound, status = incumbent, None, "time limit"
    if 3 * problem.num_stages * problem.num_microbatches <= WHOLE_OPS:
        answer = solve(problem, best, WHOLE_SHARE * time_limit_s, options)
        best, bound, status = answer.plan or best, answer.lower_bound_ms, answer.status
    if status != "optimal":
        best = _by_windows(problem, best, deadline, random.Random(seed), options)
    return MilpResult(best if best is not incumbent else None, bound, status)


def _by_windows(
    problem: Problem, plan: Plan, deadline: float, dice: random.Random, options: MilpOptions | None
) -> Plan:
    if 3 * problem.num_stages * problem.num_microbatches > MOST_OPS:
        return plan
    longest = 1.0  # what a window has cost so far, written down and solved
    while (left := deadline - time.monotonic()) > longest:
        begun = time.monotonic()
        free = _window(problem, plan, dice)
        plan = improve_window(problem, plan, free, min(WINDOW_S, left), options) or plan
        longest = max(longest, time.monotonic() - begun - WINDOW_S)
    return plan


def _window(problem: Problem, plan: Plan, dice: random.Random) -> list[Op]:
    """Ops to be re-decided: neighbours in time, and on half of the occasions in devices."""
    many = dice.choice(WINDOW_OPS)
    ops = list(_in_time(problem, plan, dice))
    first = dice.randrange(-many // 2, max(1, len(ops) - many // 2))
    free = ops[max(0, first) : first + many]
    if dice.random() < 0.3:
        forwards = [op for op in free if op.kind == "F" and problem.can_offload(op.stage)]
        chosen = dice.sample(forwards, min(OFFLOADS, len(forwards)))
        free += [Op("O", op.stage, op.microbatch) for op in chosen]
    return free


def _in_time(problem: Problem, plan: Plan, dice: random.Random) -> Iterator[Op]:
    devices = range(problem.num_devices)
    if dice.random() < 0.5 and problem.num_devices > 3:
        first = dice.randrange(problem.num_devices - 2)
        devices = range(first, first + 3)
    timed = [entry for d in devices for entry in plan.devices[d].compute]
    timed.sort(key=lambda entry: (entry.start_ms, entry.op))
    for op, _ in timed:
        if op.kind in COMPUTE:
            yield op
