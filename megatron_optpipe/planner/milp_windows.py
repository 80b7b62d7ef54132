"""Which op can lie when, below a horizon: time windows and the orders they force.

The horizon is the makespan of the incumbent: whatever would end later is of no interest. Two ops
of one device of which one cannot go first are ordered, orders narrow windows, and so on until
nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from megatron_optpipe.planner.bound_memory import NeverFits, memory_arcs
from megatron_optpipe.planner.network import Arc, Cycle, Network

MAX_ROUNDS = 20
MAX_TIGHTENINGS = 6
SLACK_MS = 1e-7


class NothingBelow(ValueError):
    """No plan ends by the horizon."""


@dataclass
class Windows:
    """Earliest and latest start (ms) of every op, and the arcs that were found to hold."""

    earliest_ms: list[float]
    latest_ms: list[float]
    forced: list[Arc]
    ancestors: list[int]


def find_windows(
    network: Network,
    extra: Collection[Arc],
    horizon_ms: float,
    *,
    fix: bool = True,
    free: Collection[int] | None = None,
) -> Windows:
    """Windows of all ops; ``fix``: also find forced orders between ops of one device.

    ``free``: only pairs with one of these ops are looked at. Raises ``NothingBelow``.
    """
    forced: list[Arc] = []
    duration = np.array(network.duration_ms)
    device = np.array(network.device)
    compute = np.array([op.kind in "FBW" for op in network.ops])
    chosen = np.ones(len(network.ops), bool)
    if free is not None:
        chosen[:] = False
        chosen[list(free)] = True
    for _ in range(MAX_ROUNDS):
        arcs = [*extra, *forced]
        try:
            head = np.array(network.heads(arcs))
            tail = np.array(network.tails(arcs))
        except Cycle:
            raise NothingBelow("the forced orders contradict each other") from None
        latest = horizon_ms - tail - duration
        if bool(np.any(latest < head - SLACK_MS)):
            raise NothingBelow("an op cannot end in time")
        ancestors = network.ancestors(arcs)
        if not fix:
            break
        found: list[Arc] = []
        for d in range(network.problem.num_devices):
            own = np.flatnonzero((device == d) & compute)
            late = head[own] + duration[own]
            # cannot[i, k]: i cannot end before the latest start of k
            cannot = late[:, None] > latest[own][None, :] + SLACK_MS
            cannot &= chosen[own][:, None] | chosen[own][None, :]
            np.fill_diagonal(cannot, False)
            for i, k in zip(*np.nonzero(cannot)):
                a, b = int(own[k]), int(own[i])
                if ancestors[a] >> b & 1:
                    raise NothingBelow("two ops of a device exclude each other")
                if not ancestors[b] >> a & 1:
                    found.append((a, b, 0.0))
        if not found:
            break
        forced += found
    return Windows(head.tolist(), latest.tolist(), forced, ancestors)


def tight_windows(
    network: Network,
    extra: Collection[Arc],
    horizon_ms: float,
    *,
    fix: bool = True,
    memory: bool = True,
    free: Collection[int] | None = None,
) -> Windows:
    """Windows together with what the memory limits imply (``memory``), until nothing moves.

    ``forced`` of the result holds both kinds of arcs. Raises ``NothingBelow``.
    """
    forced: list[Arc] = []
    for _ in range(MAX_TIGHTENINGS):
        before = len(forced)
        try:
            if memory:
                forced += memory_arcs(network, [*extra, *forced])
            windows = find_windows(network, [*extra, *forced], horizon_ms, fix=fix, free=free)
        except (NeverFits, Cycle):
            raise NothingBelow("the memory limits and the orders contradict each other") from None
        forced += windows.forced
        if len(forced) == before or not memory:
            break
    return Windows(windows.earliest_ms, windows.latest_ms, forced, windows.ancestors)
