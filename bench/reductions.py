"""What each reduction of the MILP buys: size, nodes and time with it and without it.

    python -m bench.reductions [--seconds 30]

Every row solves the same problem from the same start to optimality or the limit; a reduction that
changed an optimum would show in the last column.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from megatron_optpipe.core import Device, Link, Problem, Stage
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.milp import MilpOptions, build, solve
from megatron_optpipe.planner.milp_variables import Reductions

ALL = Reductions()
SETTINGS = {
    "all": ALL,
    "without symmetry": replace(ALL, symmetry=False),
    "without windows": replace(ALL, windows=False),
    "without memory arcs": replace(ALL, memory_arcs=False),
    "without triangles": replace(ALL, triangle_cuts=False),
    "without covers": replace(ALL, cover_cuts=False),
    "none": Reductions(False, False, False, False, False),
}


def pipeline(devices: int, microbatches: int, units: float, offload: float | None) -> Problem:
    """Equal stages, F = B = W = 1 ms; ``units`` activations fit; a transfer takes ``offload`` F."""
    size = 1_000_000
    stage = Stage(1.0, 1.0, 1.0, size, size // 2, size if offload else 0)
    links = {
        f"{way}{d}": Link(size / ((offload or 1.0) * 1e6))
        for way in ("out", "back")
        for d in range(devices)
    }
    rooms = [Device(int(units * size)) for _ in range(devices)]
    if offload:
        rooms = [replace(room, d2h=f"out{d}", h2d=f"back{d}") for d, room in enumerate(rooms)]
    return Problem(
        microbatches,
        tuple(range(devices)),
        (stage,) * devices,
        tuple(rooms),
        links if offload else {},
        0.1,
    )


PROBLEMS = {
    "3x5, limit 2": pipeline(3, 5, 2.0, None),
    "4x6, limit 3": pipeline(4, 6, 3.0, None),
    "4x8, limit 4": pipeline(4, 8, 4.0, None),
    "2x4, limit 1, offload 0.8": pipeline(2, 4, 1.0, 0.8),
    "3x4, limit 1.5, offload 0.6": pipeline(3, 4, 1.5, 0.6),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    print(
        f"{'problem':28}{'reductions':20}{'0/1':>7}{'rows':>8}{'nodes':>8}{'s':>8}"
        f"{'plan':>9}{'bound':>9}"
    )
    for name, problem in PROBLEMS.items():
        start = make_plan(problem, PlannerOptions(method="search", time_limit_s=1.0))
        for label, reductions in SETTINGS.items():
            model = build(problem, start.makespan_ms, reductions).model
            begun = time.monotonic()
            result = solve(problem, start, seconds, MilpOptions(reductions))
            took = time.monotonic() - begun
            plan = result.plan or start
            bound = result.lower_bound_ms or 0.0
            print(
                f"{name:28}{label:20}{model.num_binaries:7}{model.num_rows:8}"
                f"{result.nodes:8}{took:8.1f}{plan.makespan_ms:9.2f}{bound:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
