"""The front door: methods, determinism, units, the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import Link, OptPipeError, Plan, Problem, check
from megatron_optpipe.planner import PlannerOptions, api, make_plan, search
from megatron_optpipe.planner.cache import PlanCache
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from tests.zoo import problem

OFFLOADING = problem((0, 1, 2, 3), 8, offload=True, duplex="switch", memory=3.0)


def _options(method: str, **rest: object) -> PlannerOptions:
    return PlannerOptions(method=method, time_limit_s=0.5, **rest)  # type: ignore[arg-type]


def test_every_method_gives_a_valid_plan_or_says_that_it_does_not_fit() -> None:
    for method in api.METHODS:
        try:
            plan = make_plan(OFFLOADING, _options(method))
        except OptPipeError as refusal:
            assert method in CLASSIC_ORDERS, refusal
            continue
        assert check(OFFLOADING, plan) == []


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptPipeError, match="zb-h1"):
        make_plan(OFFLOADING, _options("best"))


@pytest.mark.parametrize("method", ["adaoffload", "search", "auto"])
def test_same_problem_and_seed_give_the_same_bytes(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plenty of time for the counted work: on a busy machine too the clock must not cut it off.
    monkeypatch.setattr(search, "_USE", 0.03)
    once, again = (make_plan(OFFLOADING, _options(method, seed=3)) for _ in range(2))
    plain = [replace(plan, solver_status=None).to_json() for plan in (once, again)]
    assert plain[0] == plain[1]


def _scaled(p: Problem, factor: float) -> Problem:
    return replace(
        p,
        stages=tuple(
            replace(
                s,
                forward_ms=s.forward_ms * factor,
                backward_input_ms=s.backward_input_ms * factor,
                backward_weight_ms=s.backward_weight_ms * factor,
            )
            for s in p.stages
        ),
        links={
            n: Link(link.gbps / factor, link.latency_ms * factor) for n, link in p.links.items()
        },
        p2p_ms=p.p2p_ms * factor if isinstance(p.p2p_ms, float) else p.p2p_ms,
    )


@pytest.mark.parametrize("method", ["adaoffload", "search"])
def test_another_unit_of_time_gives_the_same_orders(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Milliseconds or microseconds: the same plan, every start a thousand times the other."""
    monkeypatch.setattr(search, "_USE", 0.03)
    plan = make_plan(OFFLOADING, _options(method))
    other = make_plan(_scaled(OFFLOADING, 1000.0), _options(method))
    assert other.makespan_ms == pytest.approx(1000.0 * plan.makespan_ms)
    for one, two in zip(plan.devices, other.devices):
        assert [op for op, _ in one.compute] == [op for op, _ in two.compute]
        assert [op for op, _ in one.offload] == [op for op, _ in two.offload]


def test_no_method_that_searches_is_worse_than_a_classic_order() -> None:
    roomy = problem((0, 1, 2, 3), 8)
    best = min(make_plan(roomy, _options(name)).makespan_ms for name in ("1f1b", "gpipe", "zb-h2"))
    for method in ("search", "auto"):
        assert make_plan(roomy, _options(method)).makespan_ms <= best + 1e-6


def test_a_kept_plan_comes_back_without_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _options("search", cache_dir=tmp_path)
    plan = make_plan(OFFLOADING, options)

    def fail(problem: Problem, options: PlannerOptions, earlier: Plan | None) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(api, "METHODS", {**api.METHODS, "search": fail})
    assert make_plan(OFFLOADING, options) == plan


@pytest.mark.parametrize("method", api.IMPROVERS)
def test_a_plan_for_a_similar_problem_is_where_a_method_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    good = make_plan(OFFLOADING, _options("search"))
    similar = _scaled(OFFLOADING, 1.02)
    greedy = make_plan(similar, _options("greedy")).makespan_ms
    assert 1.02 * good.makespan_ms < greedy  # else this test shows nothing
    given: list[Plan | None] = []

    def improve(problem: Problem, options: PlannerOptions, earlier: Plan | None) -> Plan:
        given.append(earlier)
        return real(problem, options, earlier)

    options = _options(method, cache_dir=tmp_path)
    PlanCache(tmp_path).put(OFFLOADING, options, good)
    real = api.METHODS[method]
    monkeypatch.setattr(api, "METHODS", {**api.METHODS, method: improve})
    plan = make_plan(similar, options)
    assert check(similar, plan) == []
    (earlier,) = given
    assert earlier is not None
    assert earlier.makespan_ms == pytest.approx(1.02 * good.makespan_ms, rel=0.001)
    assert plan.makespan_ms <= earlier.makespan_ms
