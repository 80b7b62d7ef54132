"""The length of a tick: fine where it can be, coarser where sums would not fit, else refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_optpipe.core import Link, OptPipeError, Problem, check
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.feasible import modes
from megatron_optpipe.planner.flat import FEWEST_TICKS, LONGEST_TICKS, MAX_TOTAL_TICKS, Flat
from tests.zoo import problem


def _with_gbps(gbps: float) -> Problem:
    # An op lasts about 1 ms, a transfer 1000 / gbps ms.
    p = problem((0, 1), 6, memory=2.0, offload=True)
    return replace(p, links={name: Link(gbps) for name in p.links})


def _longest_and_total_ticks(flat: Flat) -> tuple[int, int]:
    parts = (flat.x_ticks, flat.y_ticks, flat.z_ticks, flat.out_ticks, flat.back_ticks)
    hops = sum(flat.x_hop) + sum(flat.y_hop)
    total = (sum(map(sum, parts)) + hops) * flat.num_microbatches
    return max(max(part) for part in parts[:3]), total


@pytest.mark.parametrize("gbps", [1e3, 1.0, 1e-2, 1e-3, 2e-4])
def test_all_sums_fit_and_the_plan_ends(gbps: float) -> None:
    p = _with_gbps(gbps)
    longest, total = _longest_and_total_ticks(modes(p)[0].readings.forward)
    assert FEWEST_TICKS <= longest <= LONGEST_TICKS
    assert total <= MAX_TOTAL_TICKS
    if gbps >= 1.0:
        assert longest == LONGEST_TICKS
    for method in ("greedy", "search"):
        plan = make_plan(p, PlannerOptions(method=method, time_limit_s=0.5))
        assert check(p, plan) == []


def test_the_unit_of_time_changes_no_tick() -> None:
    p = problem((0, 1, 2), 5, offload=True)
    us = replace(
        p,
        stages=tuple(
            replace(
                s,
                forward_ms=s.forward_ms * 1024,
                backward_input_ms=s.backward_input_ms * 1024,
                backward_weight_ms=s.backward_weight_ms * 1024,
            )
            for s in p.stages
        ),
        links={name: Link(link.gbps / 1024) for name, link in p.links.items()},
        p2p_ms=0.1 * 1024,
    )
    one, other = modes(p)[0].readings, modes(us)[0].readings
    assert (one.forward, one.mirrored) == (other.forward, other.mirrored)
    assert other.tick_ms == pytest.approx(1024 * one.tick_ms)


def test_transfers_beyond_all_proportion_are_refused_in_one_line() -> None:
    p = problem((0, 1), 50, times=(1e-4, 1e-4, 0.0), offload=True, gbps=1e-2)
    with pytest.raises(OptPipeError, match="times the longest F, B or W") as caught:
        make_plan(p, PlannerOptions(method="greedy"))
    assert "\n" not in str(caught.value)
