"""The MILP: reductions change no optimum, incumbents stay inside it, windows improve plans."""

from __future__ import annotations

import random

import pytest

from megatron_optpipe.core import Device, Link, Op, Plan, Problem, Stage, check
from megatron_optpipe.planner import make_plan
from megatron_optpipe.planner.milp import MilpOptions, build, improve_window, solve
from megatron_optpipe.planner.milp_model import FALSE, TRUE, ConditionalArc, Literal, Model
from megatron_optpipe.planner.milp_search import search_milp
from megatron_optpipe.planner.milp_variables import Reductions
from megatron_optpipe.planner.milp_windows import NothingBelow, find_windows
from megatron_optpipe.planner.network import Network
from megatron_optpipe.planner.options import PlannerOptions
from tests.planner.exhaustive import optimum_ms
from tests.planner.small_problems import small_problem

INLINE = MilpOptions(backend="inline")
ALL = Reductions()
SWITCHES = ("symmetry", "windows", "memory_arcs", "triangle_cuts", "cover_cuts")


def _greedy(problem: Problem) -> Plan:
    return make_plan(problem, PlannerOptions(method="greedy"))


def _pipeline(devices: int, microbatches: int, units: float, offload: bool = False) -> Problem:
    size = 1_000_000
    stage = Stage(1.0, 1.0, 1.0, size, size // 2, size if offload else 0)
    links = {f"{way}{d}": Link(2.0) for way in ("out", "back") for d in range(devices)}
    return Problem(
        microbatches,
        tuple(range(devices)),
        (stage,) * devices,
        tuple(
            Device(int(units * size), f"out{d}", f"back{d}")
            if offload
            else Device(int(units * size))
            for d in range(devices)
        ),
        links if offload else {},
        0.1,
    )


@pytest.mark.parametrize("switched_off", [None, *SWITCHES])
@pytest.mark.parametrize("seed", [6, 8, 12, 54])
def test_no_reduction_changes_the_optimum(seed: int, switched_off: str | None) -> None:
    problem = small_problem(seed)
    optimum = optimum_ms(problem)
    assert optimum is not None
    chosen = Reductions(**{name: name != switched_off for name in SWITCHES})
    start = _greedy(problem)
    result = solve(problem, start, 60.0, MilpOptions(chosen, backend="inline"))
    assert result.status == "optimal"
    best = min(start.makespan_ms, result.plan.makespan_ms if result.plan else start.makespan_ms)
    assert best == pytest.approx(optimum, abs=1e-5)
    assert result.lower_bound_ms is not None
    assert optimum * (1 - 1e-4) <= result.lower_bound_ms <= optimum + 1e-6


def test_reductions_make_the_model_smaller() -> None:
    problem = small_problem(8)
    horizon = _greedy(problem).makespan_ms
    full = build(problem, horizon, ALL).model
    bare = build(problem, horizon, Reductions(False, False, False, False, False)).model
    assert full.num_binaries < bare.num_binaries
    with_cuts = build(problem, horizon, Reductions(cover_cuts=True, triangle_cuts=True)).model
    without = build(problem, horizon, Reductions(cover_cuts=False, triangle_cuts=False)).model
    assert with_cuts.num_rows > without.num_rows


def test_paper_size_without_offload_is_optimal_below_the_trivial_start() -> None:
    problem = _pipeline(3, 4, 2.0)
    result = solve(problem, None, 60.0, INLINE)
    assert result.plan is not None
    assert not check(problem, result.plan)
    assert result.plan.makespan_ms == pytest.approx(optimum_ms(problem), abs=1e-5)


@pytest.mark.parametrize("seed", [2, 6, 8, 16, 23, 41])
def test_an_incumbent_lies_inside_its_window_model(seed: int) -> None:
    problem = small_problem(seed, offload=True)
    plan = _greedy(problem)
    rng = random.Random(seed)
    ops = [op for op in plan.starts() if op.kind in "FBW"]
    free = rng.sample(ops, min(len(ops), 7))
    free += [Op("O", op.stage, op.microbatch) for op in free if op.kind == "F"]
    just_above = plan.makespan_ms * (1 + 1e-6)
    variables = build(problem, just_above, ALL, plan, free)
    assert not variables.model.impossible
    from megatron_optpipe.planner import milp

    result = milp._solve_model(problem, variables, 60.0, INLINE, feasible=True)
    assert result.plan is not None
    assert result.plan.makespan_ms <= plan.makespan_ms + 1e-5
    assert not check(problem, result.plan)


def test_a_window_repairs_a_plan_made_worse() -> None:
    problem = _pipeline(3, 6, 3.0)
    worse = make_plan(problem, PlannerOptions(method="1f1b"))
    free = [op for op in worse.starts() if op.kind == "W"]
    better = improve_window(problem, worse, free, 60.0, INLINE)
    assert better is not None
    assert better.makespan_ms < worse.makespan_ms - 0.5
    assert not check(problem, better)
    kept = {op for op in worse.starts() if op.kind != "W"}
    for before, after in zip(worse.devices, better.devices):
        assert [t.op for t in before.compute if t.op in kept] == [
            t.op for t in after.compute if t.op in kept
        ]


def test_windows_in_a_loop_improve_a_greedy_plan() -> None:
    problem = _pipeline(4, 16, 3.0)
    start = _greedy(problem)
    result = search_milp(problem, start, 4.0, seed=1, options=INLINE)
    assert result.plan is not None
    assert result.plan.makespan_ms < start.makespan_ms - 0.1
    assert not check(problem, result.plan)


def test_nothing_free_improves_nothing() -> None:
    problem = _pipeline(3, 6, 3.0)
    plan = _greedy(problem)
    assert improve_window(problem, plan, [], 20.0, INLINE) is None


def test_windows_refuse_a_horizon_below_the_critical_path() -> None:
    problem = _pipeline(3, 2, 3.0)
    network = Network.of_compute(problem)
    path = max(h + d for h, d in zip(network.heads(), network.duration_ms))
    with pytest.raises(NothingBelow):
        find_windows(network, [], path - 0.01)
    windows = find_windows(network, [], path * 3)
    assert min(windows.earliest_ms) == 0.0
    assert all(early <= late for early, late in zip(windows.earliest_ms, windows.latest_ms))


def test_big_m_is_no_larger_than_the_windows_allow() -> None:
    model = Model(1.0, [2.0, 3.0])
    a, b = model.column(2.0, 10.0), model.column(3.0, 9.0)
    choice = model.binary()
    model.arc(ConditionalArc(a, b, (choice,)))
    arrays = model.arrays(b)
    # E_b - E_a >= 3 - M (1 - P) with M = 10 + 3 - 3
    assert arrays.value.tolist() == [1.0, -1.0, -10.0]
    assert arrays.row_lower.tolist() == [-7.0]
    model.arc(ConditionalArc(a, b, (FALSE,)))
    assert model.num_rows == 1, "an arc that never holds needs no row"


def test_rows_that_cannot_be_broken_are_left_out_and_broken_ones_noticed() -> None:
    model = Model(1.0, [])
    one, two = model.binary(), model.binary()
    model.at_most([(one, 1.0), (two, 1.0)], 2.0)
    assert model.num_rows == 0
    model.at_most([(one, 1.0), (two.negated(), 1.0)], 1.0)
    assert model.num_rows == 1
    assert not model.impossible
    model.at_most([(TRUE, 2.0), (Literal(0, 1, one.column), 1.0)], 1.0)
    assert model.impossible


def test_limits_below_any_plan_are_reported_as_infeasible() -> None:
    result = solve(_pipeline(2, 2, 0.5), None, 20.0, INLINE)
    assert result.plan is None
    assert result.status == "infeasible"


def test_a_problem_too_large_to_write_down_is_left_alone() -> None:
    problem = _pipeline(16, 64, 8.0, offload=True)
    result = solve(problem, None, 1.0, INLINE)
    assert result.plan is None
    assert result.lower_bound_ms is None
    assert result.status.startswith("skipped")
