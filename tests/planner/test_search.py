"""What the search must reach: figures of the issue, with little time and on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.peer_problems import peer_problem, sizes
from megatron_optpipe.core import Problem, check, summarize
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner import search as search_module
from megatron_optpipe.planner.bound import work_bound
from megatron_optpipe.planner.search import Search
from tests.zoo import problem

SIZE_8X16 = next(s for s in sizes() if (s.devices, s.microbatches) == (8, 16))


@pytest.fixture(autouse=True)
def _counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plain-Python search everywhere: no compiler, the clock far away."""
    monkeypatch.setattr(search_module, "compiled_for", lambda _: False)
    monkeypatch.setattr(search_module, "_USE", 0.05)


def _plan_ms(p: Problem, strategy: str = "auto") -> float:
    options = PlannerOptions(method="search", time_limit_s=60, offload_strategy=strategy)
    plan = make_plan(p, options)
    assert check(p, plan) == []
    return plan.makespan_ms


def _8x16(placement: str, level: float, t: float | None, links: str = "shared") -> Problem:
    return peer_problem(
        8, 16, (1, 1, 1), hop=0.1, placement=placement, level=level, offload_time=t, links=links
    )


@pytest.mark.parametrize(("level", "t", "share"), [(1.0, 0.3, 0.65), (4.0, 0.3, 0.5)])
def test_idle_time_below_1f1bs_memory(level: float, t: float, share: float) -> None:
    """With some forty schedules in plain Python; ``bench.peers`` shows what more time gives."""
    idle = _plan_ms(_8x16("4", level, t)) - 48
    assert idle <= share * (SIZE_8X16.best_peer(level, t).makespan - 48)


def test_two_fifths_of_1f1bs_memory_costs_almost_nothing_with_own_links() -> None:
    p = _8x16("4", 3.2, 0.33, links="full")
    assert _plan_ms(p) <= 1.01 * work_bound(p).ms  # the issue asks for 1.05


def test_plentiful_memory_reaches_the_bound() -> None:
    p = _8x16("4", 12.0, None)
    assert _plan_ms(p) <= 1.005 * work_bound(p).ms


@pytest.mark.parametrize(
    ("level", "zero_bubble"), [(7, 81.4), (6, 114.4), (5, 147.4), (4, 180.4), (3, 213.4)]
)
def test_where_zero_bubbles_heuristic_collapses_ours_does_not(
    level: float, zero_bubble: float
) -> None:
    assert _plan_ms(_8x16("1", level, None)) <= (1 - 0.21) * zero_bubble


def test_strategies_do_as_their_words_say() -> None:
    """Aggressive moves more than conservative, both keep the limit."""
    p = problem((0, 1, 2, 3), 8, offload=True, memory=3.0)
    moved = {}
    for strategy in ("aggressive", "conservative"):
        options = PlannerOptions(method="search", time_limit_s=5, offload_strategy=strategy)
        found = Search(p, options).run()[0]
        moved[strategy] = int((found.times().out >= 0).sum())
    assert moved["aggressive"] > moved["conservative"] > 0


def test_fewer_microbatches_stand_for_many() -> None:
    """Shapes found on 8 microbatches are good for 120, and the plan says so to the checker."""
    p = problem((0, 1, 2, 3), 120, memory=4.0)
    options = PlannerOptions(method="search", time_limit_s=10, max_microbatches=8)
    plan = make_plan(p, options)
    assert check(p, plan) == []
    assert plan.makespan_ms <= 1.02 * work_bound(p).ms
    assert max(summarize(p, plan).peak_bytes) <= p.devices[0].memory_bytes


def test_a_start_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting from a good plan, a search of next to no work gives one at least as good."""
    p = peer_problem(4, 8, (1, 1, 1), hop=0.1, placement="4", level=2, offload_time=0.3)
    good = make_plan(p, PlannerOptions(method="search", time_limit_s=60))
    monkeypatch.setattr(search_module, "_USE", 0.0)
    search = Search(p, PlannerOptions(method="search", time_limit_s=60), [good])
    found = search.run()[0].makespan * search.tick_ms
    assert found <= good.makespan_ms * 1.02


def test_another_seed_is_another_search_but_never_invalid() -> None:
    p = replace(problem((0, 1, 1, 0), 6, memory=2.5, offload=True, duplex="one"))
    for seed in range(3):
        plan = make_plan(p, PlannerOptions(method="search", time_limit_s=2, seed=seed))
        assert check(p, plan) == []
