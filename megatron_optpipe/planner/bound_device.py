"""Bounds of one device at a time: its work, between the earliest starts and the least tails."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_optpipe.core.problem import Problem

Grid = npt.NDArray[np.float64]
"""One number for every stage and microbatch, ms."""


class Reach(NamedTuple):
    """Earliest starts and least times from the end of an op to the end of the plan (rules 2-5)."""

    head: dict[str, Grid]
    tail: dict[str, Grid]


def reach_of(problem: Problem) -> Reach:
    """Heads and tails of every F, B, W by data and microbatch order alone, as ``Network`` has them.

    In closed form, a stage at a time, so that it takes no time for a million ops.
    """
    stages, many = problem.num_stages, problem.num_microbatches
    step = np.arange(many, dtype=np.float64)
    head = {kind: np.zeros((stages, many)) for kind in "FBW"}
    tail = {kind: np.zeros((stages, many)) for kind in "FBW"}
    last = {
        "F": [stage.forward_ms for stage in problem.stages],
        "B": [stage.backward_input_ms for stage in problem.stages],
        "W": [stage.backward_weight_ms for stage in problem.stages],
    }
    hop = [
        problem.hop_ms(problem.device_of(s), problem.device_of(s + 1)) for s in range(stages - 1)
    ]
    back = [
        problem.hop_ms(problem.device_of(s + 1), problem.device_of(s)) for s in range(stages - 1)
    ]

    def in_order(ready: Grid, lasts: float) -> Grid:
        """No op before it is ready nor before the one of the microbatch before it has ended."""
        return np.asarray(np.maximum.accumulate(ready - step * lasts) + step * lasts)

    for s in range(stages):
        ready = head["F"][s - 1] + last["F"][s - 1] + hop[s - 1] if s else np.zeros(many)
        head["F"][s] = in_order(ready, last["F"][s])
    for s in reversed(range(stages)):
        ready = head["F"][s] + last["F"][s]
        if s + 1 < stages:
            ready = np.maximum(ready, head["B"][s + 1] + last["B"][s + 1] + back[s])
        head["B"][s] = in_order(ready, last["B"][s])
        head["W"][s] = in_order(head["B"][s] + last["B"][s], last["W"][s])

    def to_end(after: Grid, lasts: float) -> Grid:
        """Tails: what follows an op itself, or follows the op of a later microbatch."""
        return in_order(after[::-1], lasts)[::-1]

    for s in range(stages):
        tail["W"][s] = to_end(np.zeros(many), last["W"][s])
        after = last["W"][s] + tail["W"][s]
        if s:
            after = np.maximum(after, back[s - 1] + last["B"][s - 1] + tail["B"][s - 1])
        tail["B"][s] = to_end(after, last["B"][s])
    for s in reversed(range(stages)):
        after = last["B"][s] + tail["B"][s]
        if s + 1 < stages:
            after = np.maximum(after, hop[s] + last["F"][s + 1] + tail["F"][s + 1])
        tail["F"][s] = to_end(after, last["F"][s])
    return Reach(head, tail)


def preemptive_makespan_ms(
    heads: Sequence[float], durations: Sequence[float], tails: Sequence[float]
) -> float:
    """The best makespan of one device that may interrupt its ops (Jackson's schedule).

    Always run the available op with the largest tail. No schedule of these ops, interrupted or
    not, has all of them end, each followed by its tail, earlier. All in ms.
    """
    order = sorted(range(len(heads)), key=heads.__getitem__)
    waiting: list[tuple[float, int]] = []
    left = list(durations)
    now = latest = 0.0
    at = 0
    while at < len(order) or waiting:
        if not waiting:
            now = max(now, heads[order[at]])
        while at < len(order) and heads[order[at]] <= now:
            i = order[at]
            heapq.heappush(waiting, (-tails[i], i))
            at += 1
        tail, i = waiting[0]
        until = now + left[i]
        if at < len(order) and heads[order[at]] < until:
            left[i] -= heads[order[at]] - now
            now = heads[order[at]]
            continue
        heapq.heappop(waiting)
        now = until
        latest = max(latest, now - tail)
    return latest


def work_bound_ms(problem: Problem, reach: Reach) -> float:
    """The largest preemptive one-machine bound of any device, by heads and tails of ``reach``."""
    best = 0.0
    for d in range(problem.num_devices):
        heads: list[float] = []
        lasts: list[float] = []
        tails: list[float] = []
        for s in problem.stages_on(d):
            stage = problem.stages[s]
            for kind, each in (
                ("F", stage.forward_ms),
                ("B", stage.backward_input_ms),
                ("W", stage.backward_weight_ms),
            ):
                heads += reach.head[kind][s].tolist()
                tails += reach.tail[kind][s].tolist()
                lasts += [each] * problem.num_microbatches
        if heads:
            best = max(best, preemptive_makespan_ms(heads, lasts, tails))
    return best
