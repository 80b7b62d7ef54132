"""Chrome trace of a plan and its measurement; opens in Perfetto (ui.perfetto.dev) as it is.

A process is a device, a thread is a lane, arrows are messages and transfers, a counter is memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.units import format_bytes
from megatron_optpipe.view.timeline import LANES, Bar, Timeline, of_plan

__all__ = ["trace_events", "trace_json"]

Event = dict[str, Any]

US_PER_MS = 1000.0
LANE_NAMES: Mapping[str, str] = {"compute": "compute", "d2h": "offload D2H", "h2d": "reload H2D"}
COLOUR_NAMES: Mapping[str, str] = {
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "W": "good",
    "O": "rail_animation",
    "R": "rail_response",
}


def trace_json(problem: Problem, plan: Plan, measured: Timeline | None = None) -> str:
    """The trace file's text: JSON object format, times in microseconds."""
    timelines = [of_plan(problem, plan)] + ([measured] if measured is not None else [])
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "method": plan.method,
            "planned_makespan_ms": plan.makespan_ms,
            "problem": problem.name or "",
            "problem_sha256": plan.problem_sha256,
        },
        "traceEvents": trace_events(problem, timelines),
    }
    return json.dumps(document, sort_keys=True, allow_nan=False) + "\n"


def trace_events(problem: Problem, timelines: Sequence[Timeline]) -> list[Event]:
    """All events: names first, then each timeline's slices, arrows and counters."""
    events = list(_names(problem, timelines))
    for index, timeline in enumerate(timelines):
        events.extend(_slices(timeline, index))
        events.extend(_arrows(problem, timeline, index))
        events.extend(_counters(timeline))
    return events


def _thread(lane: str, timeline: int) -> int:
    return timeline * len(LANES) + LANES.index(lane)


def _names(problem: Problem, timelines: Sequence[Timeline]) -> Iterator[Event]:
    for device, of_device in enumerate(problem.devices):
        limit = format_bytes(of_device.memory_bytes)
        name = f"device {device} (limit {limit})"
        yield _metadata("process_name", device, None, name=name)
        yield _metadata("process_sort_index", device, None, sort_index=device)
        for index, timeline in enumerate(timelines):
            for lane in LANES:
                thread = _thread(lane, index)
                name = f"{timeline.label} {LANE_NAMES[lane]}"
                yield _metadata("thread_name", device, thread, name=name)
                yield _metadata("thread_sort_index", device, thread, sort_index=thread)


def _metadata(kind: str, device: int, thread: int | None, **arguments: object) -> Event:
    event: Event = {"ph": "M", "name": kind, "pid": device, "args": arguments}
    if thread is not None:
        event["tid"] = thread
    return event


def _slices(timeline: Timeline, index: int) -> Iterator[Event]:
    for bar in timeline.bars:
        yield {
            "ph": "X",
            "name": str(bar.op),
            "cat": bar.op.kind,
            "cname": COLOUR_NAMES[bar.op.kind],
            "pid": bar.device,
            "tid": _thread(bar.lane, index),
            "ts": bar.start_ms * US_PER_MS,
            "dur": (bar.end_ms - bar.start_ms) * US_PER_MS,
            "args": {"stage": bar.op.stage, "microbatch": bar.op.microbatch},
        }


def _arrows(problem: Problem, timeline: Timeline, index: int) -> Iterator[Event]:
    """Messages between devices, and the way of an offloaded activation F - O - R - B."""
    bars = {bar.op: bar for bar in timeline.bars}
    number = 0
    for bar in timeline.bars:
        for category, target in _followers(problem, bar.op):
            reached = bars.get(target)
            same_device = reached is not None and reached.device == bar.device
            if reached is None or (category == "message" and same_device):
                continue
            number += 1
            yield from _arrow(category, f"{index}-{number}", index, bar, reached)


def _followers(problem: Problem, op: Op) -> Iterator[tuple[str, Op]]:
    kind, stage, microbatch = op
    if kind == "F":
        if stage + 1 < problem.num_stages:
            yield "message", Op("F", stage + 1, microbatch)
        yield "transfer", Op("O", stage, microbatch)
    elif kind == "B" and stage > 0:
        yield "message", Op("B", stage - 1, microbatch)
    elif kind == "O":
        yield "transfer", Op("R", stage, microbatch)
    elif kind == "R":
        yield "transfer", Op("B", stage, microbatch)


def _arrow(category: str, name: str, index: int, source: Bar, target: Bar) -> Iterator[Event]:
    # An arrow belongs to the slice its time lies in, and a slice does not contain its own end:
    # leave just before it.
    duration_us = (source.end_ms - source.start_ms) * US_PER_MS
    leave_us = source.end_ms * US_PER_MS - min(1.0, duration_us / 2)
    label = f"{source.op} to {target.op}"
    common: Event = {"cat": category, "name": label, "id": name}
    source_thread, target_thread = _thread(source.lane, index), _thread(target.lane, index)
    yield common | {"ph": "s", "pid": source.device, "tid": source_thread, "ts": leave_us}
    arrive_us = max(target.start_ms * US_PER_MS, leave_us)
    yield common | {
        "ph": "f",
        "bp": "e",
        "pid": target.device,
        "tid": target_thread,
        "ts": arrive_us,
    }


def _counters(timeline: Timeline) -> Iterator[Event]:
    for device, steps in enumerate(timeline.memory):
        for step in steps:
            yield {
                "ph": "C",
                "name": f"{timeline.label} activation bytes",
                "pid": device,
                "ts": step.time_ms * US_PER_MS,
                "args": {"resident": step.resident_bytes},
            }
