"""Every method and classic schedule on one problem: who fits, who is fast, what it costs.

A classic order is timed without looking at memory, so that the table can say by how much it
does not fit. A planning method obeys the limit or refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import Summary, summarize, time_orders
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from megatron_optpipe.units import format_bytes

__all__ = ["PLANNING_METHODS", "MethodResult", "compare_methods"]

PLANNING_METHODS = ("greedy", "adaoffload", "search", "milp", "auto")
"""Methods that plan for the memory limit, from the quickest to the most thorough."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One row of the comparison."""

    method: str
    planning_s: float
    feasible: bool
    verdict: str
    """``yes``, by how much the memory does not suffice, or why there is no such plan."""
    plan: Plan | None = None
    summary: Summary | None = None
    """None where the method has no plan for this problem."""


def compare_methods(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    methods: Sequence[str] | None = None,
) -> tuple[MethodResult, ...]:
    """Try every method (or those named) in turn, each with the time limit of its own.

    A method that has no plan for the problem is a row that says why, never an error.
    """
    wanted = (*CLASSIC_ORDERS, *PLANNING_METHODS) if methods is None else tuple(methods)
    return tuple(_rows(problem, wanted, time_limit_s, seed))


def _rows(
    problem: Problem, methods: Sequence[str], time_limit_s: float, seed: int
) -> Iterator[MethodResult]:
    for method in methods:
        if method in CLASSIC_ORDERS:
            yield _try(problem, method, partial(_classic, problem, method))
        else:
            options = PlannerOptions(method=method, time_limit_s=time_limit_s, seed=seed)
            yield _try(problem, method, partial(make_plan, problem, options))


def _classic(problem: Problem, method: str) -> Plan:
    orders = CLASSIC_ORDERS[method](problem)
    return time_orders(problem, orders, method=method, obey_memory=False)


def _try(problem: Problem, method: str, make: Callable[[], Plan]) -> MethodResult:
    began = time.perf_counter()
    try:
        plan = make()
    except OptPipeError as refusal:
        reason = " ".join(str(refusal).split()).removeprefix(f"{method}: ")
        return MethodResult(method, time.perf_counter() - began, False, f"no plan: {reason}")
    planning_s = time.perf_counter() - began
    summary = summarize(problem, plan)
    shortage = _shortage(problem, summary)
    verdict = "yes" if shortage is None else shortage
    return MethodResult(method, planning_s, shortage is None, verdict, plan, summary)


def _shortage(problem: Problem, summary: Summary) -> str | None:
    """Which device lacks most memory and how much; None where all fit."""
    lacking = [
        peak_bytes - device.memory_bytes
        for peak_bytes, device in zip(summary.peak_bytes, problem.devices, strict=True)
    ]
    worst = max(range(len(lacking)), key=lambda device: lacking[device])
    if lacking[worst] <= 0:
        return None
    return f"no: device {worst} lacks {format_bytes(lacking[worst])}"
