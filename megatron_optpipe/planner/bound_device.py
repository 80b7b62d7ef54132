"""Bounds of one device at a time: its work, between the earliest starts and the least tails."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
