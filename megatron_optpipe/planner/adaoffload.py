"""AdaOffload: a good feasible plan in a fraction of a second, on any placement and link layout.

OptPipe (2510.05186) starts its solver from such a plan; its listing is not public, so this is our
reading of it: fill the memory with forwards as far as the limit allows, then a steady phase with
backward first; offload only when something waits for memory, first what stays away longest; reload
just in time. That and a handful of other fixed shapes are tried, the shortest is taken, and of
equally long ones the one that moves less.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.families import Family
from megatron_optpipe.planner.feasible import Mode, modes
from megatron_optpipe.planner.flat import Flat
from megatron_optpipe.planner.listsched import Keys, ListScheduler, Rules, Times
from megatron_optpipe.planner.portfolio import first_shapes
from megatron_optpipe.planner.realise import realise

_MOST_VARIANTS, _OPS_TO_SCHEDULE, _COMPILED_GAIN = 16, 30_000, 20
"""Variants are tried up to so many scheduled ops (about 0.5 s of plain Python)."""
_PLAIN_S_PER_OP, _SHARE = 8e-5, 0.3
"""What one variant takes with offload; a second one may take this share of a time limit."""


def basic_keys(flat: Flat, may_leave: tuple[bool, ...], *, z_late: bool = True) -> Keys:
    """Y before X, older microbatches first, deeper stages first; Z as soon or as late as can be."""
    stage, j = np.divmod(np.arange(flat.num_stages * flat.num_microbatches), flat.num_microbatches)
    step, far = flat.num_stages, flat.num_stages * flat.num_microbatches
    y = j * step + step - stage
    return Keys(
        x=far + j * step + stage,
        y=y,
        z=y + 4 * far if z_late else y,
        may_leave=np.asarray(may_leave, np.int64)[stage],
        ahead=np.full(flat.num_stages, flat.num_microbatches),
    )


def greedy(problem: Problem) -> Plan:
    """One run of the list scheduler with basic keys. Raises ``Infeasible``."""
    return _shortest(problem, variants=1, method="greedy")


def adaoffload(
    problem: Problem, *, compiled: bool = False, time_limit_s: float = float("inf")
) -> Plan:
    """The shortest of the variants above, fewer for a short time limit. Raises ``Infeasible``."""
    ops = 3 * problem.num_stages * problem.num_microbatches
    gain = _COMPILED_GAIN if compiled else 1
    variants = min(_MOST_VARIANTS, max(2, _OPS_TO_SCHEDULE * gain // ops))
    if 2 * ops * _PLAIN_S_PER_OP / gain > _SHARE * time_limit_s:
        variants = 1
    return _shortest(problem, variants, method="adaoffload", compiled=compiled)


def _shortest(problem: Problem, variants: int, method: str, *, compiled: bool = False) -> Plan:
    best: tuple[int, int, Mode, Times] | None = None
    for mode in modes(problem):
        for times in _schedules(mode, variants, compiled):
            rank = (times.makespan, int((times.out >= 0).sum()))
            if best is None or rank < best[:2]:
                best = (*rank, mode, times)
    assert best is not None  # modes() is never empty, and the list scheduler never stuck
    _, _, mode, times = best
    return realise(problem, mode.readings.forward, times, method)


def _schedules(mode: Mode, variants: int, compiled: bool) -> Iterator[Times]:
    flat = mode.readings.forward
    family = Family(flat, mode.may_leave)
    scheduler = ListScheduler(flat, compiled=compiled)
    # Never stuck, and offloads only for what waits for memory.
    tries = [(basic_keys(flat, mode.may_leave), Rules(water=1024))]
    tries += [family.keys(shape) for shape in first_shapes(family)[: variants - 1]]
    for keys, rules in tries:
        times = scheduler.run(keys, rules)
        if times is not None:
            yield times
