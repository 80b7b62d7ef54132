"""The front door of the planner: a problem and options in, a valid plan out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_optpipe.core.check import require_valid
from megatron_optpipe.core.errors import Deadlock, OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import time_orders
from megatron_optpipe.planner.adaoffload import adaoffload, greedy
from megatron_optpipe.planner.auto import auto, incumbents, searched, shortest
from megatron_optpipe.planner.cache import PlanCache
from megatron_optpipe.planner.feasible import Infeasible
from megatron_optpipe.planner.milp import MilpOptions
from megatron_optpipe.planner.milp_search import search_milp
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.orders import CLASSIC_ORDERS

Method = Callable[[Problem, PlannerOptions, Plan | None], Plan]
"""The last one: a valid plan to begin at, for the methods of ``IMPROVERS``."""


def make_plan(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """A valid plan for ``problem``.

    Raises:
        Infeasible: no plan exists (or none of the classic order asked for); names the limit
            that would do.
        OptPipeError: the method is unknown, or not made for this placement.
    """
    options = options or PlannerOptions()
    method = METHODS.get(options.method)
    if method is None:
        raise OptPipeError(
            f"method = {options.method!r}: must be one of {', '.join(sorted(METHODS))}"
        )
    if options.cache_dir is None or options.method not in IMPROVERS:
        plan = method(problem, options, None)
        require_valid(problem, plan)
        return plan
    return _with_cache(method, problem, options, PlanCache(options.cache_dir))


def _with_cache(
    method: Method, problem: Problem, options: PlannerOptions, cache: PlanCache
) -> Plan:
    """The plan kept for this problem; else a new one, which begins at a similar problem's plan.

    That earlier plan is re-timed and checked by the cache; nothing longer comes back.
    """
    kept = cache.get(problem, options)
    if kept is not None:
        return kept
    plan = method(problem, options, cache.nearest(problem))
    require_valid(problem, plan)
    cache.put(problem, options, plan)
    return plan


def _classic(name: str) -> Method:
    def plan(problem: Problem, options: PlannerOptions, earlier: Plan | None) -> Plan:
        orders = CLASSIC_ORDERS[name](problem)
        try:
            return time_orders(problem, orders, method=name)
        except Deadlock:
            free = time_orders(problem, orders, method=name, obey_memory=False)
            short = [
                (d, device.peak_bytes or 0)
                for d, device in enumerate(free.devices)
                if (device.peak_bytes or 0) > problem.devices[d].memory_bytes
            ]
            d, peak = max(short, key=lambda entry: entry[1])
            raise Infeasible(
                f"{name}: does not fit, device {d} needs {peak} bytes, memory_bytes = "
                f"{problem.devices[d].memory_bytes}; raise the limit or choose another method"
            ) from None

    return plan


def _milp(problem: Problem, options: PlannerOptions, earlier: Plan | None = None) -> Plan:
    """The MILP of the paper from the best incumbent: as a whole, or a window at a time."""
    began = time.monotonic()
    known = incumbents(problem, time_limit_s=options.time_limit_s)
    best = shortest(problem, known if earlier is None else [*known, earlier])
    left = options.time_limit_s - (time.monotonic() - began)
    answer = search_milp(
        problem, best, left, seed=options.seed, options=MilpOptions(mip_gap=options.mipgap)
    )
    return dataclasses.replace(
        answer.plan or best,
        lower_bound_ms=answer.lower_bound_ms,
        solver_status=answer.status,
    )


IMPROVERS = ("search", "milp", "auto")
"""The methods that begin at a plan; theirs are worth keeping, the others take no time."""

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        **{name: _classic(name) for name in CLASSIC_ORDERS},
        "greedy": lambda problem, options, earlier: greedy(problem),
        "adaoffload": lambda problem, options, earlier: adaoffload(
            problem, time_limit_s=options.time_limit_s
        ),
        "search": searched,
        "milp": _milp,
        "auto": auto,
    }
)
"""Every planning method by the name a user types."""
