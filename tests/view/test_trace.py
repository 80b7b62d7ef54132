"""The trace is a valid Chrome trace: names, slices, arrows that join slices, counters."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_optpipe.core import load_plan, load_problem
from megatron_optpipe.view.timeline import of_plan
from megatron_optpipe.view.trace import trace_json
from tests.zoo import ZOO

VECTORS = Path(__file__).parents[1] / "core" / "vectors"
GOLDEN = Path(__file__).parent / "tiny.trace.json"

Event = dict[str, Any]


def _events(name: str, measured: bool = False) -> tuple[Any, Any, list[Event]]:
    problem, plan = ZOO[name]()
    timeline = of_plan(problem, plan, "measured") if measured else None
    document = json.loads(trace_json(problem, plan, timeline))
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    return problem, plan, document["traceEvents"]


def test_golden_file() -> None:
    """The bytes of one small trace; look at a change in Perfetto before accepting it."""
    problem = load_problem(VECTORS / "tiny.problem.json")
    text = trace_json(problem, load_plan(VECTORS / "tiny.plan.json"))
    assert json.loads(text) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("measured", [False, True])
def test_every_event_is_well_formed(name: str, measured: bool) -> None:
    problem, _, events = _events(name, measured)
    for event in events:
        assert event["ph"] in "MXCsf"
        assert event["pid"] in range(problem.num_devices)
        if event["ph"] != "M":
            assert isinstance(event["ts"], float)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= named
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert processes == set(range(problem.num_devices))


def test_slices_are_the_plan_in_microseconds() -> None:
    problem, plan, events = _events("offload-all-full-duplex")
    slices = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    expected = {
        str(op): (start_ms * 1000.0, problem.duration_ms(op) * 1000.0)
        for op, start_ms in plan.starts().items()
    }
    assert slices.keys() == expected.keys()
    for name, (ts, dur) in expected.items():
        assert slices[name] == pytest.approx((ts, dur))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_arrows_join_slices(name: str) -> None:
    """Each arrow has one start inside a slice of its thread and one end, later, in another."""
    _, _, events = _events(name)
    slices = [e for e in events if e["ph"] == "X"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert any(_inside(start, s) for s in slices)
        assert any(_inside(end, s) for s in slices)


def _inside(event: Event, slice_: Event) -> bool:
    thread = (event["pid"], event["tid"]) == (slice_["pid"], slice_["tid"])
    within = slice_["ts"] - 1e-6 <= event["ts"] <= slice_["ts"] + slice_["dur"] + 1e-6
    return bool(thread and within)


def test_one_arrow_a_message_and_three_a_moved_activation() -> None:
    problem, _, events = _events("offload-all-full-duplex")
    count = Counter(e["cat"] for e in events if e["ph"] == "s")
    microbatches, stages = problem.num_microbatches, problem.num_stages
    assert count["message"] == 2 * (stages - 1) * microbatches
    assert count["transfer"] == 3 * stages * microbatches


def test_no_message_inside_a_device() -> None:
    problem, _, events = _events("v-shape")
    count = Counter(e["cat"] for e in events if e["ph"] == "s")
    crossing = sum(
        problem.device_of(stage) != problem.device_of(stage + 1)
        for stage in range(problem.num_stages - 1)
    )
    assert count["message"] == 2 * crossing * problem.num_microbatches


def test_counters_reach_the_peak_and_return_to_zero() -> None:
    problem, plan, events = _events("offload-all-full-duplex")
    for device in range(problem.num_devices):
        values = [e["args"]["resident"] for e in events if e["ph"] == "C" and e["pid"] == device]
        assert max(values) == plan.devices[device].peak_bytes
        assert values[-1] == 0
