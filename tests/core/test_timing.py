"""Earliest times, their figures, and deadlocks that say who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_optpipe.core import (
    Deadlock,
    Device,
    Op,
    Orders,
    check,
    retime,
    summarize,
    time_orders,
)
from tests import zoo
from tests.zoo import ZOO, problem


@pytest.mark.parametrize("name", sorted(ZOO))
def test_retiming_a_plan_keeps_it_valid_and_no_later(name: str) -> None:
    p, plan = ZOO[name]()
    again = retime(p, plan)
    assert check(p, again) == []
    assert again.makespan_ms <= plan.makespan_ms + 1e-6


@pytest.mark.parametrize("name", sorted(ZOO))
@given(factors=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), slow=st.floats(0.2, 5.0))
@settings(max_examples=15, deadline=None)
def test_retiming_for_other_durations_keeps_every_rule(
    name: str, factors: list[float], slow: float
) -> None:
    """Orders and waits carry the memory limit over to other speeds (contract, "Executing")."""
    p, plan = ZOO[name]()
    other = replace(
        p,
        stages=tuple(
            replace(
                s,
                forward_ms=s.forward_ms * factors[0],
                backward_input_ms=s.backward_input_ms * factors[1],
                backward_weight_ms=s.backward_weight_ms * factors[2],
            )
            for s in p.stages
        ),
        links={name: replace(link, gbps=link.gbps * slow) for name, link in p.links.items()},
    )
    assert check(other, retime(other, plan, planned_for=p)) == []


def test_closed_form_of_one_at_a_time() -> None:
    p = problem((0, 1, 2), 2, times=(1.0, 2.0, 3.0), p2p_ms=0.5)
    plan = time_orders(p, zoo.one_at_a_time(p), method="serial")
    # The last W of the first microbatch overlaps nothing that the second needs on device 0.
    round_trip = 3 * 1.0 + 2 * 0.5 + 3 * 2.0 + 2 * 0.5 + 3.0
    assert plan.makespan_ms == pytest.approx(2 * round_trip)


def test_figures() -> None:
    p, plan = ZOO["offload-all-full-duplex"]()
    figures = summarize(p, plan)
    assert figures.busy_ms == pytest.approx((12.0,) * 4)
    assert figures.bubble == pytest.approx(1 - 12.0 / plan.makespan_ms)
    assert figures.moved_bytes == (4 * zoo.GB,) * 4
    assert figures.peak_bytes == (2 * zoo.GB,) * 4
    assert max(figures.own_span_ms) <= plan.makespan_ms
    assert figures.host_peak_bytes == zoo.HOST_PEAK * zoo.GB or figures.host_peak_bytes > 0


def test_host_limit_is_what_the_plan_reaches() -> None:
    p, plan = ZOO["offload-host-limit"]()
    assert summarize(p, plan).host_peak_bytes == p.host_memory_bytes


def test_a_cycle_names_who_waits_for_whom() -> None:
    p = problem((0, 1), 1)
    f0, f1, b0, b1 = Op("F", 0, 0), Op("F", 1, 0), Op("B", 0, 0), Op("B", 1, 0)
    w0, w1 = Op("W", 0, 0), Op("W", 1, 0)
    orders = Orders.without_offload(((b0, f0, w0), (f1, b1, w1)))
    with pytest.raises(Deadlock) as caught:
        time_orders(p, orders, method="x")
    assert "B(0,0)" in str(caught.value)
    assert "needs" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_that_never_fits_is_named() -> None:
    p = replace(problem((0, 1), 3), devices=(Device(2 * zoo.GB), Device(9 * zoo.GB)))
    with pytest.raises(Deadlock, match=r"F\(0,2\).*memory_bytes"):
        time_orders(p, zoo.all_forwards_first(p, weights_last=False), method="gpipe")


def test_memory_is_left_alone_on_request() -> None:
    p = replace(problem((0, 1), 3), devices=(Device(2 * zoo.GB), Device(9 * zoo.GB)))
    orders = zoo.all_forwards_first(p, weights_last=False)
    plan = time_orders(p, orders, method="gpipe", obey_memory=False)
    assert plan.devices[0].peak_bytes == 3 * zoo.GB
    assert [v.rule for v in check(p, plan)] == ["7"]
