"""Timelines agree with the figures that core computes for the same plan."""

from __future__ import annotations

import pytest

from megatron_optpipe.core import Op, summarize
from megatron_optpipe.view.timeline import Bar, memory_steps, of_plan
from tests.zoo import ZOO, problem


@pytest.mark.parametrize("name", sorted(ZOO))
def test_figures_equal_those_of_core(name: str) -> None:
    p, plan = ZOO[name]()
    timeline, summary = of_plan(p, plan), summarize(p, plan)
    assert timeline.makespan_ms == pytest.approx(summary.makespan_ms)
    assert timeline.bubble == pytest.approx(summary.bubble)
    peaks = tuple(timeline.peak_bytes(device) for device in range(p.num_devices))
    assert peaks == summary.peak_bytes


@pytest.mark.parametrize("name", sorted(ZOO))
def test_all_memory_is_given_back(name: str) -> None:
    p, plan = ZOO[name]()
    for steps in of_plan(p, plan).memory:
        assert steps[0].resident_bytes == 0
        assert steps[-1].resident_bytes == 0
        assert [s.time_ms for s in steps] == sorted(s.time_ms for s in steps)


def test_every_op_is_one_bar_on_the_lane_of_its_kind() -> None:
    p, plan = ZOO["offload-all-full-duplex"]()
    timeline = of_plan(p, plan)
    assert {bar.op for bar in timeline.bars} == set(plan.starts())
    assert len(timeline.bars) == len(plan.starts())
    lanes = {"compute": "FBW", "d2h": "O", "h2d": "R"}
    for lane, kinds in lanes.items():
        for device in range(p.num_devices):
            bars = timeline.lane(device, lane)
            assert {bar.op.kind for bar in bars} <= set(kinds)
            assert [b.start_ms for b in bars] == sorted(b.start_ms for b in bars)


def test_releases_come_before_allocations_of_the_same_time() -> None:
    p = problem((0,), 2)
    bars = [
        Bar(0, "compute", Op("F", 0, 0), 0.0, 1.0),
        Bar(0, "compute", Op("B", 0, 0), 1.0, 2.0),
        # A rounding error earlier than the end of B, within the contract's tolerance.
        Bar(0, "compute", Op("F", 0, 1), 2.0 - 5e-7, 3.0),
    ]
    held = [step.resident_bytes for step in memory_steps(p, bars, 0)]
    assert held == [0, 10**9, 5 * 10**8, 15 * 10**8]
