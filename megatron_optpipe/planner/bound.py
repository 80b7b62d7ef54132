"""Proven lower bounds of the makespan: no valid plan of the problem is shorter.

Five arguments, the best of which is reported:

* work: each device must do its ops, none before its earliest start, and each is followed by at
  least its tail (preemptive one-machine bound; contains the critical path of a microbatch);
* memory arcs: what must have been released before an op can allocate, then the same again;
* waiting W: they hold memory, so only so many can come after the last B of a stage;
* work-and-time: bytes times ms that activations must lie on a device, less what links can carry;
* horizon test: below some makespan, time windows, orders and memory arcs contradict each other.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.bound_device import preemptive_makespan_ms, reach_of, work_bound_ms
from megatron_optpipe.planner.bound_energy import energy_bound_ms
from megatron_optpipe.planner.bound_memory import NeverFits, memory_arcs
from megatron_optpipe.planner.bound_pending import pending_bound_ms
from megatron_optpipe.planner.bound_period import memory_reach_of
from megatron_optpipe.planner.milp_windows import NothingBelow, tight_windows
from megatron_optpipe.planner.network import Arc, Cycle, Network

MAX_ARC_OPS = 8_000
MAX_TEST_OPS = 700
PRECISION = 1e-5
WORK = "work of the busiest device"
ARCS = "memory: releases before forwards"
PENDING = "memory: W that wait hold it"
ENERGY = "memory: bytes times time, and link time"
HORIZON = "time windows contradict each other below it"


class Bound(NamedTuple):
    """A lower bound in ms and the argument that gives it."""

    ms: float
    reason: str


def work_bound(problem: Problem) -> Bound:
    """What the work and the critical path alone ask, ignoring memory and links."""
    return Bound(work_bound_ms(problem, reach_of(problem)) * (1 - 1e-12), WORK)


def lower_bound(problem: Problem, budget_s: float = 2.0, upper_ms: float | None = None) -> Bound:
    """The best bound found within about ``budget_s``.

    ``upper_ms``: the makespan of a known plan; arguments stop where they reach it.
    """
    begun = time.monotonic()
    reach = reach_of(problem)
    best = Bound(work_bound_ms(problem, reach), WORK)
    tied = memory_reach_of(problem, reach)
    if tied is not None:
        best = _better(best, work_bound_ms(problem, tied), ARCS)
    arcs: list[Arc] = []
    network: Network | None = None
    if 3 * problem.num_stages * problem.num_microbatches <= MAX_ARC_OPS:
        network = Network.of_compute(problem)
        try:
            arcs = memory_arcs(network, deadline=begun + 0.4 * budget_s)
            if arcs:
                best = _better(best, _one_machine_ms(network, arcs), ARCS)
        except (NeverFits, Cycle):
            return Bound(float("inf"), "no plan keeps the memory limit")
    best = _better(best, pending_bound_ms(problem, tied or reach), PENDING)
    best = _better(best, energy_bound_ms(problem, reach, best.ms), ENERGY)
    spare = budget_s - (time.monotonic() - begun)
    if network is not None and len(network.ops) <= MAX_TEST_OPS and spare > 0 and upper_ms:
        best = _better(best, _horizon_test(network, arcs, best.ms, upper_ms, spare), HORIZON)
    if upper_ms is not None and best.ms > upper_ms:
        best = Bound(upper_ms, best.reason)  # equal up to rounding
    return Bound(best.ms * (1 - 1e-12), best.reason)


def _better(best: Bound, ms: float, reason: str) -> Bound:
    return Bound(ms, reason) if ms > best.ms + 1e-9 else best


def _one_machine_ms(network: Network, arcs: list[Arc]) -> float:
    heads, tails = network.heads(arcs), network.tails(arcs)
    own: list[list[int]] = [[] for _ in network.problem.devices]
    for i, d in enumerate(network.device):
        own[d].append(i)
    best = 0.0
    for ops in own:
        if ops:
            best = max(
                best,
                preemptive_makespan_ms(
                    [heads[i] for i in ops],
                    [network.duration_ms[i] for i in ops],
                    [tails[i] for i in ops],
                ),
            )
    return best


def _horizon_test(
    network: Network, arcs: list[Arc], low: float, high: float, budget_s: float
) -> float:
    """The largest horizon found (by bisection) at which the windows contradict each other."""
    deadline = time.monotonic() + budget_s
    if high <= low * (1 + PRECISION) or not _contradiction(network, arcs, low * (1 + PRECISION)):
        return low
    best = low
    if _contradiction(network, arcs, high * (1 - PRECISION)):
        return high * (1 - PRECISION)
    while high - best > PRECISION * high and time.monotonic() < deadline:
        middle = 0.5 * (best + high)
        if _contradiction(network, arcs, middle):
            best = middle
        else:
            high = middle
    return best


def _contradiction(network: Network, arcs: list[Arc], horizon_ms: float) -> bool:
    """Whether no plan ends by ``horizon_ms``; False: not known."""
    try:
        windows = tight_windows(network, arcs, horizon_ms)
        return _one_machine_ms(network, [*arcs, *windows.forced]) > horizon_ms + 1e-6
    except NothingBelow:
        return True
