"""From a schedule in ticks to a plan in milliseconds: same orders, same waits, earliest times."""

from __future__ import annotations

import heapq
from collections import defaultdict

from megatron_optpipe.core.op import COMPUTE, TRANSFER, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import Orders, data_needs, plan_from_starts
from megatron_optpipe.planner.flat import Flat
from megatron_optpipe.planner.listsched import Times

_RANK = {"W": 0, "O": 1, "R": 2, "F": 3, "B": 3}
Event = tuple[int, int, int, int, int, Op]
"""start, end, rank, microbatch, stage (ticks); sorts every op after what it waits for."""


def realise(problem: Problem, flat: Flat, times: Times, method: str) -> Plan:
    """The plan of a schedule of either reading. Every memory release that the schedule has before
    an allocation stays before it, so the plan keeps rules 7 and 8 whatever the rounding of ticks.
    """
    return realise_events(problem, _events(flat, times), method)


def realise_events(problem: Problem, events: list[Event], method: str) -> Plan:
    """The plan of ops with starts and ends in ticks: their orders and waits, earliest times."""
    events.sort()
    compute: list[list[Op]] = [[] for _ in problem.devices]
    offload: list[list[Op]] = [[] for _ in problem.devices]
    reload: list[list[Op]] = [[] for _ in problem.devices]
    lanes = {"O": offload, "R": reload}
    start: dict[Op, float] = {}
    end: dict[Op, float] = {}
    lane_free: dict[tuple[str, int], float] = defaultdict(float)
    link_free: dict[str, float] = defaultdict(float)
    releases: list[list[tuple[int, float]]] = [[] for _ in problem.devices]
    released = [0.0] * problem.num_devices
    host_releases: list[tuple[int, float]] = []
    host_released = 0.0
    # Durations and bytes are those of a stage, whatever the microbatch.
    lasts = {
        (kind, stage): problem.duration_ms(Op(kind, stage, 0))
        for stage in range(problem.num_stages)
        for kind in (*COMPUTE, *(TRANSFER if problem.can_offload(stage) else ()))
    }
    changes = {(kind, stage): problem.memory_change(Op(kind, stage, 0)) for kind, stage in lasts}
    for tick, tick_end, _, _, _, op in events:
        device = problem.device_of(op.stage)
        lane = lanes.get(op.kind, compute)[device]
        lane_key = (op.kind if op.kind in lanes else "", device)
        at = lane_free[lane_key]
        if op.kind == "O":
            at = max(at, end[Op("F", op.stage, op.microbatch)])
            while host_releases and host_releases[0][0] <= tick:
                host_released = max(host_released, heapq.heappop(host_releases)[1])
            if problem.host_memory_bytes is not None:
                at = max(at, host_released)
        elif op.kind == "R":
            at = max(at, end[Op("O", op.stage, op.microbatch)])
        else:
            for need, hop in data_needs(problem, op):
                at = max(at, end[need] + hop)
            if op.kind == "B":
                at = max(at, end.get(Op("R", op.stage, op.microbatch), 0.0))
        link = problem.link_name(op) if op.kind in lanes else ""
        if link:
            at = max(at, link_free[link])
        taken, given = changes[op.kind, op.stage]
        if taken:
            pending = releases[device]
            while pending and pending[0][0] <= tick:
                released[device] = max(released[device], heapq.heappop(pending)[1])
            at = max(at, released[device])
        until = at + lasts[op.kind, op.stage]
        start[op], end[op] = at, until
        lane_free[lane_key] = until
        if link:
            link_free[link] = until
        if given:
            heapq.heappush(releases[device], (tick_end, until))
        if op.kind == "R":
            heapq.heappush(host_releases, (tick_end, until))
        lane.append(op)
    orders = Orders(*(tuple(tuple(lane) for lane in part) for part in (compute, offload, reload)))
    return plan_from_starts(problem, orders, start, method)


def _events(flat: Flat, times: Times) -> list[Event]:
    """Every op with its start and end in ticks, in forward time."""
    m = flat.num_microbatches
    mirrored = bool(flat.z_first)
    kinds = "BFWRO" if mirrored else "FBWOR"
    lasts = (flat.x_ticks, flat.y_ticks, flat.z_ticks, flat.out_ticks, flat.back_ticks)
    parts = (times.x, times.y, times.z, times.out, times.back)
    events: list[Event] = []
    for kind, last, starts in zip(kinds, lasts, parts):
        rank = _RANK[kind]
        for i, at in enumerate(starts.tolist()):
            if at < 0:
                continue
            stage, j = divmod(i, m)
            until = at + last[stage]
            if mirrored:
                at, until, j = times.makespan - until, times.makespan - at, m - 1 - j
            events.append((at, until, rank, j, stage, Op(kind, stage, j)))
    return events
