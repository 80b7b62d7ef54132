"""OR-Tools CP-SAT as an optional engine: the same problem as a constraint program.

Where `ortools` is installed (extra ``exact``) it proves optima that the MILP does not reach: see
docs/milp.md for figures. Times become whole ticks; the orders found are timed again exactly, and
the plan is checked, as with the MILP. It runs in a process of its own, with one worker and a fixed
seed, so that a solve that ends gives the same plan again.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_optpipe.core.check import check
from megatron_optpipe.core.op import COMPUTE, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.milp_result import SHORTER_MS, MilpResult, warned
from megatron_optpipe.planner.milp_windows import NothingBelow, tight_windows
from megatron_optpipe.planner.network import Network
from megatron_optpipe.planner.realise import realise_events
from megatron_optpipe.planner.solve_process import GRACE_S, Answer, run_child

CHILD = Path(__file__).with_name("cpsat_child.py")
START_UP_S = 1.0
"""What importing ortools takes, out of the time limit."""
FINEST_TICKS = 2_000_000
"""Ticks in a horizon whose durations are no round numbers."""
MEMORY_BYTES = 3 << 30
_RANK = {"W": 0, "O": 1, "R": 2, "F": 3, "B": 3}


def available() -> bool:
    """Whether OR-Tools is installed (it is not imported here)."""
    return importlib.util.find_spec("ortools") is not None


def solve(
    problem: Problem,
    incumbent: Plan,
    time_limit_s: float,
    *,
    lower_ms: float = 0.0,
    seed: int = 0,
    mip_gap: float = 0.0,
) -> MilpResult:
    """A plan shorter than ``incumbent`` (or None), a proven bound, and how the solver stopped."""
    begun = time.monotonic()
    network = Network.of_compute(problem)
    try:
        windows = tight_windows(network, [], incumbent.makespan_ms * (1 + 1e-9))
    except NothingBelow:
        return warned("failed: the model excludes the plan in hand")
    ticks = Ticks(problem, network, incumbent.makespan_ms)
    left = time_limit_s - (time.monotonic() - begun)
    asked = request_of(problem, network, ticks, incumbent, lower_ms)
    for i in range(len(windows.earliest_ms)):
        asked["ops"][i][1] = ticks.down(windows.earliest_ms[i])
        asked["ops"][i][2] = ticks.up(windows.latest_ms[i])
    asked["arcs"] += [[a, b, 0, -1] for a, b, _ in windows.forced]
    asked |= {
        "time_limit_s": max(0.1, left - START_UP_S),
        "hard_limit_s": left + GRACE_S,
        "memory_bytes": MEMORY_BYTES,
        "seed": seed,
        "mip_gap": mip_gap,
    }
    output = run_child(CHILD, json.dumps(asked).encode(), left + GRACE_S)
    if isinstance(output, Answer):
        return warned(output.status)
    try:
        return _result(problem, network, ticks, incumbent, json.loads(output))
    except (ValueError, KeyError, TypeError, IndexError) as failure:
        return warned(f"failed: unreadable answer ({type(failure).__name__})")


class Ticks:
    """Whole numbers for times: exact where all durations are round decimals, else rounded."""

    def __init__(self, problem: Problem, network: Network, horizon_ms: float) -> None:
        times = [*network.duration_ms, *(lag for _, _, lag in network.arcs)]
        for s in range(problem.num_stages):
            if problem.can_offload(s):
                times += [problem.duration_ms(Op(kind, s, 0)) for kind in "OR"]
        self.per_ms = FINEST_TICKS / horizon_ms
        self.exact = False
        for digits in range(7):
            rate = 10.0**digits
            if horizon_ms * rate > 20 * FINEST_TICKS:
                break
            if all(abs(t * rate - round(t * rate)) < 1e-7 for t in times):
                self.per_ms, self.exact = rate, True
                break
        count = len(network.ops) * (5 / 3) + len(network.arcs)
        self.error_ms = 0.0 if self.exact else 0.5 * count / self.per_ms
        """How far rounding may move a makespan."""

    def near(self, time_ms: float) -> int:
        """The nearest tick."""
        return round(time_ms * self.per_ms)

    def down(self, time_ms: float) -> int:
        """A tick certainly not later, rounding of all durations included."""
        return max(0, math.floor((time_ms - self.error_ms) * self.per_ms - 1e-6))

    def up(self, time_ms: float) -> int:
        """A tick certainly not earlier."""
        return math.ceil((time_ms + self.error_ms) * self.per_ms + 1e-6)


def request_of(
    problem: Problem, network: Network, ticks: Ticks, incumbent: Plan, lower_ms: float
) -> dict[str, Any]:
    """What the child solves, in ticks and bytes.

    ``ops``: [duration, earliest, latest start, choice or -1]; ``arcs``: [a, b, lag, choice];
    ``machines``: ops that exclude each other; ``pools``: [limit, [[op, at its end, change]...]];
    ``last``: ops that end the plan; ``hint``: starts in the incumbent.
    """
    names = list(network.ops)
    horizon = ticks.up(incumbent.makespan_ms)
    ops = [[ticks.near(lasts), 0, horizon, -1] for lasts in network.duration_ms]
    arcs = [[a, b, ticks.near(lag), -1] for a, b, lag in network.arcs]
    at: dict[Op, int] = dict(network.index)
    choices: list[Op] = []
    for s in range(problem.num_stages):
        for j in range(problem.num_microbatches if problem.can_offload(s) else 0):
            x = len(choices)
            choices.append(Op("O", s, j))
            for kind in "OR":
                at[Op(kind, s, j)] = len(names)
                names.append(Op(kind, s, j))
                ops.append([ticks.near(problem.duration_ms(names[-1])), 0, horizon, x])
            chain = [at[Op(kind, s, j)] for kind in "FORB"]
            arcs += [[a, b, 0, x] for a, b in zip(chain, chain[1:])]
    starts = incumbent.starts()
    ended = {a for a, _, _ in network.arcs}
    return {
        "horizon": horizon,
        "lower": min(ticks.down(lower_ms), horizon),
        "ops": ops,
        "arcs": arcs,
        "choices": len(choices),
        "machines": _machines(problem, names),
        "pools": _pools(problem, names),
        "last": [i for i in range(len(network.ops)) if i not in ended],
        "hint": [ticks.near(starts[op]) if op in starts else None for op in names],
        "hint_choices": [1 if op in starts else 0 for op in choices],
    }


def _machines(problem: Problem, names: list[Op]) -> list[list[int]]:
    users: dict[str, list[int]] = {}
    for i, op in enumerate(names):
        compute = op.kind in COMPUTE
        name = f"device {problem.device_of(op.stage)}" if compute else problem.link_name(op)
        users.setdefault(f"{compute} {name}", []).append(i)
    return [group for group in users.values() if len(group) > 1]


def _pools(problem: Problem, names: list[Op]) -> list[list[Any]]:
    pools: list[list[Any]] = [[device.memory_bytes, []] for device in problem.devices]
    for i, op in enumerate(names):
        change = problem.memory_change(op)
        events = pools[problem.device_of(op.stage)][1]
        if change.at_start_bytes:
            events.append([i, 0, change.at_start_bytes])
        if change.at_end_bytes:
            events.append([i, 1, change.at_end_bytes])
    if problem.host_memory_bytes is not None:
        host: list[list[int]] = []
        for i, op in enumerate(names):
            wire = problem.stages[op.stage].wire_bytes
            if op.kind == "O":
                host.append([i, 0, wire])
            elif op.kind == "R":
                host.append([i, 1, -wire])
        pools.append([problem.host_memory_bytes, host])
    return [pool for pool in pools if sum(max(0, e[2]) for e in pool[1]) > pool[0]]


def _result(
    problem: Problem, network: Network, ticks: Ticks, incumbent: Plan, said: Mapping[str, Any]
) -> MilpResult:
    names = {"OPTIMAL": "optimal", "FEASIBLE": "time limit", "UNKNOWN": "time limit"}
    if said["status"] not in names:
        return warned(f"failed: the solver says {said['status'].lower()}, although a plan exists")
    bound = None
    if said["bound"] is not None and math.isfinite(said["bound"]):
        bound = max(0.0, said["bound"] / ticks.per_ms - ticks.error_ms)
        bound = min(bound, incumbent.makespan_ms) * (1 - 1e-9)
    status, nodes = names[said["status"]], int(said["nodes"])
    if said["starts"] is None:
        return MilpResult(None, bound, status, nodes)
    plan = _plan(problem, network, ticks, said)
    if plan is None:
        return warned("failed: the solution is no valid plan")
    if plan.makespan_ms >= incumbent.makespan_ms - SHORTER_MS:
        plan = None
    return MilpResult(plan, bound, status, nodes)


def _plan(problem: Problem, network: Network, ticks: Ticks, said: Mapping[str, Any]) -> Plan | None:
    names = list(network.ops)
    there = [True] * len(names)
    k = 0
    for s in range(problem.num_stages):
        for j in range(problem.num_microbatches if problem.can_offload(s) else 0):
            names += [Op("O", s, j), Op("R", s, j)]
            there += [bool(said["choices"][k])] * 2
            k += 1
    events = []
    for op, here, start in zip(names, there, said["starts"], strict=True):
        if here:
            end = start + ticks.near(problem.duration_ms(op))
            events.append((start, end, _RANK[op.kind], op.microbatch, op.stage, op))
    try:
        plan = realise_events(problem, events, "cp-sat")
    except KeyError:  # an op before what it needs
        return None
    return None if check(problem, plan) else plan
