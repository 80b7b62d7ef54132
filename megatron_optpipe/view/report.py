"""A few lines of text that say how good a plan is."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import summarize
from megatron_optpipe.units import format_bytes, format_ms

__all__ = ["plan_report"]

MAX_DEVICES_SHOWN = 16


def plan_report(problem: Problem, plan: Plan) -> Iterator[str]:
    """Makespan, bubble, bound and gap, solver, moved bytes, and the peak of each device."""
    summary = summarize(problem, plan)
    yield f"method     {plan.method}"
    yield f"makespan   {format_ms(summary.makespan_ms)}"
    yield f"bubble     {summary.bubble:.2%} (mean over {problem.num_devices} devices)"
    yield f"own span   {format_ms(max(summary.own_span_ms))} (longest)"
    if plan.lower_bound_ms:
        gap = summary.makespan_ms / plan.lower_bound_ms - 1.0
        yield f"bound      {format_ms(plan.lower_bound_ms)} (proven; gap {gap:.2%})"
    else:
        yield "bound      none"
    if plan.solver_status:
        yield f"solver     {plan.solver_status}"
    if plan.solve_ms is not None:
        yield f"planned in {plan.solve_ms / 1e3:.2f} s"
    yield f"moved      {format_bytes(sum(summary.moved_bytes))} to the host and back"
    for device, peak_bytes in enumerate(summary.peak_bytes[:MAX_DEVICES_SHOWN]):
        limit_bytes = problem.devices[device].memory_bytes
        part = f" ({peak_bytes / limit_bytes:.0%})" if limit_bytes else ""
        yield (
            f"device {device:<3} peak {format_bytes(peak_bytes)}"
            f" of {format_bytes(limit_bytes)}{part}"
        )
    if problem.num_devices > MAX_DEVICES_SHOWN:
        fullest = max(range(problem.num_devices), key=lambda d: summary.peak_bytes[d])
        yield (
            f"...        {problem.num_devices - MAX_DEVICES_SHOWN} more devices; the largest peak"
            f" is {format_bytes(summary.peak_bytes[fullest])} on device {fullest}"
        )
