"""Whatever the solver's process does, the planner gets an answer and keeps its plan."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron_optpipe.planner import make_plan, solve_process
from megatron_optpipe.planner.milp import build, solve
from megatron_optpipe.planner.milp_model import Arrays
from megatron_optpipe.planner.milp_variables import Reductions
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.solve_child import solve_arrays
from tests.planner.small_problems import small_problem

ANSWER = """
import io, sys
import numpy as np
data = dict(np.load(io.BytesIO(sys.stdin.buffer.read())))
n = data["objective"].size
def answer(status, x, bound=0.0):
    out = io.BytesIO()
    np.savez(out, status=np.int64(status), x=x, bound=np.float64(bound), nodes=np.int64(0))
    sys.stdout.buffer.write(out.getvalue())
"""
STUBS = {
    "sleeps": ("import time; time.sleep(600)", "killed"),
    "ignores_sigterm": (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
        "killed",
    ),
    "raises": ("raise RuntimeError('no licence')", "no licence"),
    "is_killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "crashes": ("import os; os.abort()", "SIGABRT"),
    "says_nothing": ("pass", "unreadable"),
    "writes_rubbish": ("import sys; sys.stdout.buffer.write(b'PK rubbish')", "unreadable"),
    "x_is_nan": (ANSWER + "answer(0, np.full(n, np.nan))", "not finite"),
    "x_is_short": (ANSWER + "answer(0, np.zeros(n - 1))", "shape"),
    "x_is_fractional": (ANSWER + "answer(0, np.full(n, 0.5))", "fractions"),
    "x_breaks_rows": (ANSWER + "answer(0, data['lower'])", "rows"),
    "x_leaves_bounds": (ANSWER + "answer(0, data['upper'] + 1)", "bounds"),
    "optimal_without_x": (ANSWER + "answer(0, np.zeros(0))", "without a solution"),
    "unknown_status": (ANSWER + "answer(4, np.zeros(0))", "status 4"),
    "time_out_without_x": (ANSWER + "answer(1, np.zeros(0))", "time limit"),
    "falsely_infeasible": (ANSWER + "answer(2, np.zeros(0))", "infeasible"),
}


def _knapsack() -> Arrays:
    """Minimise -3a - 2b over whole a, b in 0..5 with 2a + b <= 7: a = 1, b = 5, value -13."""
    return Arrays(
        np.array([-3.0, -2.0]),
        np.zeros(2),
        np.full(2, 5.0),
        np.ones(2, dtype=np.int8),
        np.array([0, 0]),
        np.array([0, 1]),
        np.array([2.0, 1.0]),
        np.array([-np.inf]),
        np.array([7.0]),
    )


@pytest.mark.parametrize("name", STUBS)
def test_a_bad_solver_leaves_the_incumbent_and_one_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, said = STUBS[name]
    stub = tmp_path / "stub.py"
    stub.write_text(script)
    monkeypatch.setattr(solve_process, "CHILD", stub)
    problem = small_problem(6)
    incumbent = make_plan(problem, PlannerOptions(method="greedy"))
    limit_s = 0.4 if "killed" in said else 20.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = solve(problem, incumbent, limit_s)
    assert result.plan is None, "nothing better than the incumbent was found"
    assert result.lower_bound_ms is None
    assert said in result.status
    assert len(caught) == 1
    assert said in str(caught[0].message)


def test_memory_blow_up_ends_the_child_only(tmp_path: Path) -> None:
    hog = tmp_path / "hog.py"
    hog.write_text(
        "import io, json, resource, sys\nimport numpy as np\n"
        "data = dict(np.load(io.BytesIO(sys.stdin.buffer.read())))\n"
        "limit = json.loads(str(data['settings']))['memory_bytes']\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "np.ones(limit)\n"
    )
    answer = solve_process.solve(_knapsack(), 20.0, memory_bytes=1 << 30, child=hog)
    assert answer.failed
    assert "MemoryError" in answer.status or "allocate" in answer.status


def test_real_child_under_too_little_memory_fails_and_says_so() -> None:
    answer = solve_process.solve(_knapsack(), 20.0, memory_bytes=50 << 20)
    assert answer.failed
    assert answer.x is None


def test_child_solves_and_does_not_touch_the_parent() -> None:
    before = dict(os.environ)
    answer = solve_process.solve(_knapsack(), 20.0)
    assert answer.status == "optimal"
    assert answer.x is not None
    assert answer.x.tolist() == [1.0, 5.0]
    assert answer.bound == pytest.approx(-13.0)
    assert dict(os.environ) == before


def test_what_a_solver_prints_does_not_spoil_the_answer(tmp_path: Path) -> None:
    loud = tmp_path / "loud.py"
    noise = "    os.system('echo from below')\n    print('noise')\n"
    call = "    result = milp("
    loud.write_text(solve_process.CHILD.read_text().replace(call, noise + call))
    answer = solve_process.solve(_knapsack(), 20.0, child=loud)
    assert answer.status == "optimal"


def test_child_imports_no_more_than_scipy() -> None:
    source = solve_process.CHILD.read_text()
    assert "megatron_optpipe" not in source
    assert "import torch" not in source


def test_options_are_not_shared_with_scipy() -> None:
    options = {"time_limit": 5.0, "mip_rel_gap": 0.0, "presolve": True, "disp": False}
    kept = dict(options)
    solve_arrays(_knapsack()._asdict(), options)
    assert options == kept


def test_false_infeasible_is_retried_without_presolve(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem(6)
    incumbent = make_plan(problem, PlannerOptions(method="greedy"))
    asked: list[bool] = []

    def wrong_with_presolve(
        arrays: Arrays, time_limit_s: float, *, mip_gap: float = 0.0, presolve: bool = True
    ) -> solve_process.Answer:
        asked.append(presolve)
        if presolve:
            return solve_process.Answer("infeasible")
        return solve_process.solve_inline(arrays, time_limit_s, mip_gap=mip_gap)

    monkeypatch.setattr("megatron_optpipe.planner.milp.SOLVERS", {"scipy": wrong_with_presolve})
    result = solve(problem, incumbent, 60.0)
    assert asked == [True, False]
    assert result.plan is not None
    assert result.plan.makespan_ms == pytest.approx(12.8)


def test_inline_and_process_agree() -> None:
    problem = small_problem(54)
    incumbent = make_plan(problem, PlannerOptions(method="greedy"))
    arrays_of = build(problem, incumbent.makespan_ms, Reductions())
    arrays = arrays_of.model.arrays(arrays_of.makespan)
    one = solve_process.solve(arrays, 60.0)
    two = solve_process.solve_inline(arrays, 60.0)
    assert one.status == two.status == "optimal"
    assert one.x is not None
    assert two.x is not None
    assert one.x[arrays_of.makespan] == pytest.approx(two.x[arrays_of.makespan])
