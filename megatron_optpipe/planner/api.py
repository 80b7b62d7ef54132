"""The front door of the planner: a problem and options in, a valid plan out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_optpipe.core.check import require_valid
from megatron_optpipe.core.errors import Deadlock, OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import time_orders
from megatron_optpipe.planner.feasible import Infeasible, modes
from megatron_optpipe.planner.greedy import greedy_times
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from megatron_optpipe.planner.realise import realise

Method = Callable[[Problem, PlannerOptions], Plan]


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
    plan = method(problem, options)
    require_valid(problem, plan)
    return plan


def _classic(name: str) -> Method:
    def plan(problem: Problem, options: PlannerOptions) -> Plan:
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


def _greedy(problem: Problem, options: PlannerOptions) -> Plan:
    best: Plan | None = None
    for mode in modes(problem):
        flat, times = min(greedy_times(mode), key=lambda pair: pair[1].makespan)
        plan = realise(problem, flat, times, "greedy")
        if best is None or plan.makespan_ms < best.makespan_ms:
            best = plan
    assert best is not None  # modes() is never empty
    return best


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        **{name: _classic(name) for name in CLASSIC_ORDERS},
        "greedy": _greedy,
        "adaoffload": _greedy,
        "search": _greedy,
        "milp": _greedy,
        "auto": _greedy,
    }
)
"""Every planning method by the name a user types."""
