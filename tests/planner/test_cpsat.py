"""The optional engine: the same optima as the exhaustive search, and no harm where it fails."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import check
from megatron_optpipe.planner import cpsat, make_plan, settle
from megatron_optpipe.planner.network import Network
from megatron_optpipe.planner.options import PlannerOptions
from tests.planner.exhaustive import optimum_ms
from tests.planner.small_problems import small_problem

GREEDY = PlannerOptions(method="greedy")
installed = pytest.mark.skipif(not cpsat.available(), reason="ortools is not installed")


@installed
@pytest.mark.parametrize("seed", [6, 8, 12, 24, 42, 54, 66])
def test_same_optimum_as_the_exhaustive_search(seed: int) -> None:
    problem = small_problem(seed)
    start = make_plan(problem, GREEDY)
    answer = cpsat.solve(problem, start, 60.0)
    plan = answer.plan or start
    assert answer.status == "optimal"
    assert not check(problem, plan)
    optimum = optimum_ms(problem)
    assert plan.makespan_ms == pytest.approx(optimum, abs=1e-5)
    assert answer.lower_bound_ms is not None
    assert optimum is not None
    assert optimum * (1 - 1e-4) <= answer.lower_bound_ms <= optimum + 1e-6


@installed
def test_durations_that_are_no_round_numbers() -> None:
    problem = small_problem(6)
    odd = replace(
        problem,
        stages=tuple(
            replace(stage, forward_ms=stage.forward_ms * (1 + 0.0123456789 * (s + 1)))
            for s, stage in enumerate(problem.stages)
        ),
    )
    start = make_plan(odd, GREEDY)
    answer = cpsat.solve(odd, start, 60.0)
    plan = answer.plan or start
    optimum = optimum_ms(odd)
    assert optimum is not None
    assert plan.makespan_ms == pytest.approx(optimum, rel=1e-4)
    assert answer.lower_bound_ms is not None
    assert answer.lower_bound_ms <= optimum


@installed
def test_the_same_seed_gives_the_same_plan() -> None:
    problem = small_problem(8)
    start = make_plan(problem, GREEDY)
    one, two = (cpsat.solve(problem, start, 60.0, seed=3) for _ in range(2))
    assert one.plan is not None
    assert two.plan is not None
    assert one.plan.to_json() == two.plan.to_json()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import time; time.sleep(600)", "killed"),
        ("raise ImportError('no ortools')", "no ortools"),
        ("print('nonsense')", "unreadable"),
        ('print(\'{"status": "INFEASIBLE", "bound": null}\')', "infeasible"),
        (
            'print(\'{"status": "OPTIMAL", "bound": 1, "nodes": 1, "starts": [0], '
            '"choices": []}\')',
            "unreadable",
        ),
        (
            "import json, sys; a = json.loads(sys.stdin.read()); print(json.dumps({'status': "
            "'OPTIMAL', 'bound': 1, 'nodes': 0, 'starts': [0] * len(a['ops']), "
            "'choices': [0] * a['choices']}))",
            "no valid plan",
        ),
    ],
)
def test_a_bad_child_leaves_the_incumbent_and_one_warning(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(script)
    monkeypatch.setattr(cpsat, "CHILD", stub)
    problem = small_problem(6)
    start = make_plan(problem, GREEDY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = cpsat.solve(problem, start, 0.4 if said == "killed" else 20.0)
    assert answer.plan is None
    assert answer.lower_bound_ms is None
    assert said in answer.status
    assert len(caught) == 1


def test_ticks_are_exact_for_round_numbers_and_careful_for_others() -> None:
    problem = small_problem(6)
    network = Network.of_compute(problem)
    ticks = cpsat.Ticks(problem, network, 20.0)
    assert ticks.exact
    assert ticks.error_ms == 0.0
    odd = replace(problem, p2p_ms=1 / 3)
    rounded = cpsat.Ticks(odd, Network.of_compute(odd), 20.0)
    assert not rounded.exact
    assert 0 < rounded.error_ms < 1e-3
    assert rounded.down(5.0) < rounded.near(5.0) < rounded.up(5.0)


def test_without_ortools_the_milp_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "available", lambda: False)
    problem = small_problem(6)
    settled = settle.settle(problem, make_plan(problem, GREEDY), 60.0, search_states=0)
    assert settled.status == "optimal"
    assert settled.plan.makespan_ms == pytest.approx(12.8)
    assert "CP-SAT" not in settled.bound.reason
