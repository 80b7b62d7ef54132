"""What the planner reaches beside the peers: near bounds, without offload, large, odd problems.

    python -m bench.claims [--only NAME...] [--jobs N] [--json FILE]

Every plan is made in a process of its own, which is where its memory is measured. F:B:W = 1:1:1,
hop 0.1, in the peers' units (``peer_problems``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.peer_problems import UNIT_BYTES, peer_problem
from megatron_optpipe.core import Device, Link, OptPipeError, Problem, Stage
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.bound import work_bound

FBW, HOP = (1.0, 1.0, 1.0), 0.1


@dataclass(frozen=True)
class Claim:
    """One problem to plan."""

    group: str
    name: str
    problem: Problem
    time_limit_s: float
    method: str = "auto"


@dataclass(frozen=True)
class Result:
    """What came of it; times of the plan in the problem's ms."""

    group: str
    name: str
    makespan: float
    bound: float
    work_bound: float
    """The bound that ignores memory."""
    time_limit_s: float
    plan_s: float
    memory_gb: float
    """Peak resident memory of the planning process."""


def _of(
    devices: int,
    microbatches: int,
    placement: str,
    level: float,
    t: float | None = None,
    links: str = "full",
) -> Problem:
    return peer_problem(
        devices, microbatches, FBW,
        hop=HOP, placement=placement, level=level, offload_time=t, links=links,
    )  # fmt: skip


def _plentiful() -> Iterator[Claim]:
    for p, m, limit in ((4, 8, 6.0), (8, 16, 6.0), (8, 32, 6.0), (16, 32, 10.0), (16, 64, 15.0)):
        for chunks in ("1", "2", "4"):
            problem = _of(p, m, chunks, 1.5 * p)
            yield Claim("plentiful", f"{p}x{m}, {chunks} chunks", problem, limit)


def _scarce() -> Iterator[Claim]:
    for p, m, limit in ((8, 16, 10.0), (8, 32, 18.0), (16, 64, 30.0)):
        for t in (0.1, 0.33):
            for placement in ("1", "2", "4", "2v", "4v"):
                problem = _of(p, m, placement, 0.4 * p, t)
                yield Claim("40 %", f"{p}x{m} t {t}, {placement}", problem, limit)


def _no_offload() -> Iterator[Claim]:
    for level in (7, 6, 5, 4, 3):
        yield Claim("no offload", f"8x16 at {level}", _of(8, 16, "1", level), 20.0)


def _times() -> Iterator[Claim]:
    for p, m, chunks in ((16, 64, "1"), (16, 64, "4"), (32, 256, "1")):
        problem = _of(p, m, chunks, 0.6 * p, 0.3)
        yield Claim("first plan", f"{p}x{m}, {chunks} chunks", problem, 1.0, "adaoffload")
    for p, m, chunks, level, limit in (
        (8, 32, "4", 3.2, 18.0),
        (16, 64, "4", 6.4, 58.0),
        (64, 512, "1", 30.0, 58.0),
        (64, 128, "4", 30.0, 58.0),
    ):
        yield Claim("final plan", f"{p}x{m}, {chunks} chunks", _of(p, m, chunks, level, 0.3), limit)


def _odd() -> Iterator[Claim]:
    base = _of(8, 16, "1", 4.0, 0.3)
    heavy = replace(
        base.stages[0], forward_ms=1.4, backward_input_ms=1.4, backward_weight_ms=1.4
    )  # + 40 %, as with an embedding and a loss
    uneven = (heavy, *base.stages[1:-1], heavy)
    yield Claim("odd", "heavy first and last stage", replace(base, stages=uneven), 10.0)
    bus = {f"pcie{d}": Link(base.links["d2h0"].gbps) for d in range(8)}
    half = tuple(Device(d.memory_bytes, f"pcie{i}", f"pcie{i}") for i, d in enumerate(base.devices))
    yield Claim("odd", "half duplex", replace(base, links=bus, devices=half), 10.0)
    switch = tuple(
        Device(d.memory_bytes, f"pcie{i // 4}", f"pcie{i // 4}") for i, d in enumerate(base.devices)
    )
    shared = replace(base, links={k: bus[k] for k in ("pcie0", "pcie1")}, devices=switch)
    yield Claim("odd", "four devices share a half-duplex switch", shared, 10.0)
    growing = tuple(replace(s, backward_frees_bytes=-UNIT_BYTES // 10) for s in base.stages)
    yield Claim("odd", "B needs more memory than it frees", replace(base, stages=growing), 10.0)
    host = replace(base, host_memory_bytes=8 * UNIT_BYTES)
    yield Claim("odd", "host memory for 8 microbatches' activations", host, 10.0)
    for placement in ("2", "2v", "4v"):
        problem = _of(8, 16, placement, 4.0, 0.3)
        stages = _heavier_ends(problem.stages)
        yield Claim("odd", f"heavy ends, {placement}", replace(problem, stages=stages), 10.0)


def _heavier_ends(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    def heavier(stage: Stage) -> Stage:
        return replace(
            stage,
            forward_ms=1.4 * stage.forward_ms,
            backward_input_ms=1.4 * stage.backward_input_ms,
            backward_weight_ms=1.4 * stage.backward_weight_ms,
        )

    return (heavier(stages[0]), *stages[1:-1], heavier(stages[-1]))


_PROFILED = {
    "1.5B": (8, 24, (18.5, 18.1, 9.3), 0.6, 0.1585, 0.0433),
    "6.2B": (8, 24, (29.7, 29.4, 19.9), 0.53, 0.1323, 0.0029),
    "14.6B": (16, 48, (11.3, 11.2, 8.1), 0.38, 0.1397, 0.0066),
    "28.3B": (32, 96, (10.4, 10.2, 7.7), 0.41, 0.1421, 0.0038),
}
"""Times in ms and bubble rates of ZB-1p and ZB-2p printed by Zero Bubble (2401.10241, tables 3 to
5): devices, microbatches, F:B:W, hop, bubble at 1F1B's memory, bubble at twice that."""


def _profiled() -> Iterator[Claim]:
    for model, (p, m, fbw, hop, at_1p, at_2p) in _PROFILED.items():
        for times, rate in ((1, at_1p), (2, at_2p)):
            theirs = sum(fbw) * m / (1 - rate)
            problem = peer_problem(p, m, fbw, hop=hop, placement="1", level=times * p)
            name = f"{model} {p}x{m} at {times}p (ZB-{times}p {theirs:.1f})"
            yield Claim("profiled", name, problem, 20.0)
        for placement in ("1", "2v"):
            problem = peer_problem(
                p, m, fbw,
                hop=hop, placement=placement, level=p / 2, offload_time=0.3, links="full",
            )  # fmt: skip
            name = f"{model} {p}x{m} at p/2, offload t 0.3, {placement}"
            yield Claim("profiled", name, problem, 20.0)


GROUPS = {
    "profiled": _profiled,
    "plentiful": _plentiful,
    "scarce": _scarce,
    "no-offload": _no_offload,
    "times": _times,
    "odd": _odd,
}


def measure(claim: Claim) -> Result:
    """Plan one; an infeasible one has an infinite makespan."""
    options = PlannerOptions(method=claim.method, time_limit_s=claim.time_limit_s, cache_dir=None)
    began = time.perf_counter()
    try:
        plan = make_plan(claim.problem, options)
        makespan, bound = plan.makespan_ms, plan.lower_bound_ms or 0.0
    except OptPipeError:
        makespan, bound = float("inf"), 0.0
    plan_s = time.perf_counter() - began
    return Result(
        group=claim.group,
        name=claim.name,
        makespan=makespan,
        bound=bound,
        work_bound=work_bound(claim.problem).ms,
        time_limit_s=claim.time_limit_s,
        plan_s=plan_s,
        memory_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    )


HEADER = (
    "| what | problem | makespan | bound | without memory | above that | s (limit) | GB |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def render(r: Result) -> str:
    """One line of the table, in Markdown."""
    above = f"{100 * (r.makespan / r.work_bound - 1):+.2f} %"
    return (
        f"| {r.group} | {r.name} | {r.makespan:.2f} | {r.bound:.2f} | {r.work_bound:.2f} | "
        f"{above} | {r.plan_s:.1f} ({r.time_limit_s:g}) | {r.memory_gb:.2f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(GROUPS), default=list(GROUPS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    claims = [claim for name in args.only for claim in GROUPS[name]()]
    print(HEADER, flush=True)
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for result in pool.map(measure, claims):
            found.append(result)
            print(render(result), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
