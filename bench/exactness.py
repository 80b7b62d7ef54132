"""The planner's front door against an independent exhaustive search on random small problems.

    python -m bench.exactness [--seeds N] [--jobs N] [--time-limit S] [--states N]

At most 3 devices, 4 stages, 4 microbatches; the seeds 0 to N-1 of ``tests/planner/small_problems``,
none left out. Seeds that the exhaustive search does not settle within its states are listed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from megatron_optpipe.planner import PlannerOptions, make_plan
from tests.planner.exhaustive import TooLarge, optimum_ms
from tests.planner.small_problems import small_problem


class Row(NamedTuple):
    """One seed."""

    seed: int
    makespan: float
    status: str
    optimum: float | None
    """None: not settled."""
    plan_s: float


def compare(seed: int, time_limit_s: float, states: int) -> Row:
    """Plan one problem with ``auto`` and search it exhaustively."""
    warnings.simplefilter("ignore")
    problem = small_problem(seed)
    began = time.monotonic()
    plan = make_plan(problem, PlannerOptions(time_limit_s=time_limit_s))
    took = time.monotonic() - began
    try:
        optimum = optimum_ms(problem, states)
    except TooLarge:
        optimum = None
    return Row(seed, plan.makespan_ms, plan.solver_status or "", optimum, took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=236)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--states", type=int, default=1_000_000)
    args = parser.parse_args()
    one = partial(compare, time_limit_s=args.time_limit, states=args.states)
    rows: list[Row] = []
    say = partial(print, flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(one, range(args.first, args.first + args.seeds)):
            rows.append(row)
            if row.optimum is None:
                say(f"seed {row.seed}: not settled; ours {row.makespan:g}, {row.status}")
            elif abs(row.makespan - row.optimum) > 1e-5:
                say(f"seed {row.seed}: {row.makespan:g}, optimum {row.optimum:g}, {row.status}")
    settled = [row for row in rows if row.optimum is not None]
    equal = sum(abs(row.makespan - (row.optimum or 0.0)) <= 1e-5 for row in settled)
    proven = sum(row.status.startswith("optimal") for row in rows)
    times = [row.plan_s for row in rows]
    print(
        f"{len(rows)} problems: {len(settled)} settled, {equal} of them equal to the optimum; "
        f"{proven} proven by the planner; planning {sum(times) / len(times):.1f} s on average, "
        f"{max(times):.1f} s at most"
    )
    return 0 if equal == len(settled) else 1


if __name__ == "__main__":
    sys.exit(main())
