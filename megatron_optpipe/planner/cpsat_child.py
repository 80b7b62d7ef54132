"""The other end of `cpsat`: reads a scheduling problem (JSON) from stdin, solves it with CP-SAT.

Run as a file, so that nothing but ortools is imported. Whole numbers only; see `cpsat.request_of`.
"""

import json
import os
import signal
import sys
from typing import Any, TextIO


def build(asked: dict[str, Any]) -> tuple[Any, list[Any], list[Any], Any]:
    """The CP-SAT model, start variables, presence literals, and the makespan."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = asked["horizon"]
    choice = [model.new_bool_var(f"x{k}") for k in range(asked["choices"])]
    starts, intervals, present = [], [], []
    for i, (lasts, low, high, x) in enumerate(asked["ops"]):
        start = model.new_int_var(max(0, low), min(high, horizon - lasts), f"s{i}")
        starts.append(start)
        present.append(1 if x < 0 else choice[x])
        if x < 0:
            intervals.append(model.new_fixed_size_interval_var(start, lasts, f"i{i}"))
        else:
            intervals.append(
                model.new_optional_fixed_size_interval_var(start, lasts, choice[x], f"i{i}")
            )
    for a, b, lag, x in asked["arcs"]:
        row = model.add(starts[b] >= starts[a] + asked["ops"][a][0] + lag)
        if x >= 0:
            row.only_enforce_if(choice[x])
    for users in asked["machines"]:
        model.add_no_overlap([intervals[i] for i in users])
    for limit, events in asked["pools"]:
        model.add_reservoir_constraint_with_active(
            [starts[i] + (asked["ops"][i][0] if at_end else 0) for i, at_end, _ in events],
            [change for _, _, change in events],
            [present[i] for i, _, _ in events],
            -sum(abs(change) for _, _, change in events),
            limit,
        )
    makespan = model.new_int_var(asked["lower"], horizon, "makespan")
    for i in asked["last"]:
        model.add(makespan >= starts[i] + asked["ops"][i][0])
    model.minimize(makespan)
    for i, at in enumerate(asked["hint"]):
        if at is not None:
            model.add_hint(starts[i], at)
    for k, value in enumerate(asked["hint_choices"]):
        model.add_hint(choice[k], value)
    return model, starts, present, makespan


def main() -> None:
    """Solve one problem; the answer is one JSON object."""
    with os.fdopen(os.dup(1), "w", encoding="ascii") as answers:
        os.dup2(2, 1)  # what solvers print must not mix with the answer
        _answer(answers)


def _answer(answers: TextIO) -> None:
    asked = json.loads(sys.stdin.buffer.read())
    if hasattr(signal, "alarm"):  # dies by itself, also where the parent is gone
        signal.alarm(int(asked["hard_limit_s"]) + 2)
    if asked["memory_bytes"]:
        try:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"],) * 2)
        except (ImportError, ValueError, OSError):
            pass  # not on this system: the parent's wall limit stays
    from ortools.sat.python import cp_model

    model, starts, _, _ = build(asked)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = asked["time_limit_s"]
    solver.parameters.num_workers = 1  # more are faster, and differ from run to run
    solver.parameters.random_seed = asked["seed"]
    solver.parameters.relative_gap_limit = asked["mip_gap"]
    status = solver.status_name(solver.solve(model))
    found = status in ("OPTIMAL", "FEASIBLE")
    answer = {
        "status": status,
        "starts": [solver.value(start) for start in starts] if found else None,
        "choices": [
            solver.boolean_value(model.get_bool_var_from_proto_index(k))
            for k in range(asked["choices"])
        ]
        if found
        else None,
        "bound": solver.best_objective_bound if status != "INFEASIBLE" else None,
        "nodes": solver.num_branches,
    }
    answers.write(json.dumps(answer))


if __name__ == "__main__":
    main()
