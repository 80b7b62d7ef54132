"""What the least memory is, and how offloads may be counted on when host memory is short.

One microbatch at a time is the least that any plan needs: while F or B of a stage runs, the lower
stages of the device hold what cannot leave it. The list scheduler finds a plan wherever that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.flat import Readings, alone_bytes, readings

_MOST_STAGES_TO_ENUMERATE = 12


class Infeasible(OptPipeError):
    """No plan exists; the message names the smallest limit that would do.

    A limit of the host is the smallest with which this planner finds a plan: it lets what must
    leave a device stay away together. Where B takes memory (negative ``backward_frees_bytes``)
    a plan could do with less by sending stages away in turn.
    """


@dataclass(frozen=True)
class Mode:
    """One way to read the problem for the list scheduler: its flat form, what may be offloaded."""

    readings: Readings
    may_leave: tuple[bool, ...]
    """By stage."""


def modes(problem: Problem) -> list[Mode]:
    """The ways to read a problem, at least one. Raises ``Infeasible``."""
    stages = range(problem.num_stages)
    full = [s.offload_bytes if problem.can_offload(i) else 0 for i, s in enumerate(problem.stages)]
    for d, device in enumerate(problem.devices):
        least = alone_bytes(problem, d, full)
        if least > device.memory_bytes:
            raise Infeasible(
                f"devices[{d}].memory_bytes = {device.memory_bytes}: no plan fits, one microbatch "
                f"alone needs {least} bytes there; raise the limit to at least {least}"
            )
    host = problem.host_memory_bytes
    if host is None:
        return [Mode(readings(problem), tuple(bool(full[s]) for s in stages))]
    found = []
    nothing = [0] * problem.num_stages
    if all(
        alone_bytes(problem, d, nothing) <= device.memory_bytes
        for d, device in enumerate(problem.devices)
    ):
        # Plans exist without any offload: offload whenever the host has room, count on none.
        found.append(Mode(readings(problem, rely=False), tuple(bool(full[s]) for s in stages)))
    needed = {s for d in range(problem.num_devices) for s in _fewest_offloads(problem, d, full)}
    least_host = sum(problem.stages[s].wire_bytes for s in needed)
    if needed and least_host <= host:
        # So few microbatches under way that the host always has room for what must leave.
        cap = host // least_host if least_host else problem.num_microbatches
        only = [full[s] if s in needed else 0 for s in stages]
        found.append(
            Mode(
                readings(problem, in_flight=min(cap, problem.num_microbatches), moves=only),
                tuple(s in needed for s in stages),
            )
        )
    if not found:
        raise Infeasible(
            f"host_memory_bytes = {host}: found no plan, what must leave the devices for one "
            f"microbatch takes {least_host} bytes on the host; raise the limit to at least "
            f"{least_host}, or that of the devices"
        )
    return found


def _fewest_offloads(problem: Problem, device: int, full: list[int]) -> tuple[int, ...]:
    """The stages of a device that must leave for one microbatch to fit, fewest wire bytes."""
    limit = problem.devices[device].memory_bytes
    movable = [s for s in problem.stages_on(device) if full[s]]

    def fits(chosen: tuple[int, ...]) -> bool:
        moves = [full[s] if s in chosen else 0 for s in range(problem.num_stages)]
        return alone_bytes(problem, device, moves) <= limit

    def cost(chosen: tuple[int, ...]) -> tuple[int, int]:
        return sum(problem.stages[s].wire_bytes for s in chosen), len(chosen)

    if len(movable) <= _MOST_STAGES_TO_ENUMERATE:
        options = (c for n in range(len(movable) + 1) for c in combinations(movable, n))
        return min((c for c in options if fits(c)), key=cost)
    chosen = tuple(movable)
    for s in sorted(movable, key=lambda s: problem.stages[s].wire_bytes, reverse=True):
        fewer = tuple(c for c in chosen if c != s)
        if fits(fewer):
            chosen = fewer
    return chosen
