"""Ours against every peer: at each size and memory level where a peer stands, who ends first?

    python -m bench.peers [--time-limit S] [--sizes 8x16] [--jobs N] [-o docs/bench-planner.md]

At a level with an offload time, ours plans with that transfer speed and shared links, as the peer
does; at one without, ours moves nothing, except against a peer that recomputes activations: to that
spare of memory ours answers with offloading at the slowest speed of the table. Ours takes the best
of five placements (1, 2 or 4 chunks, interleaved or V), as the peers' own list does. Idle time is
makespan minus the work of a device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.peer_problems import PLACEMENTS, Size, peer_problem, sizes
from megatron_optpipe.core import OptPipeError
from megatron_optpipe.planner import PlannerOptions, make_plan


@dataclass(frozen=True)
class Row:
    """One level of one size."""

    size: str
    level: float
    offload_time: float | None
    our_offload_time: float | None
    below_1f1b: bool
    peer: str
    peer_makespan: float
    ours: float
    placement: str
    bound: float
    work: float
    plan_s: float

    @property
    def idle_ratio(self) -> float:
        return (self.ours - self.work) / (self.peer_makespan - self.work)


def _plan(task: tuple[Size, float, float | None, str, float]) -> tuple[float, str, float, float]:
    size, level, offload_time, placement, limit_s = task
    problem = peer_problem(
        size.devices,
        size.microbatches,
        size.fbw,
        hop=size.hop,
        placement=placement,
        level=level,
        offload_time=offload_time,
    )
    started = time.perf_counter()
    try:
        plan = make_plan(problem, PlannerOptions(time_limit_s=limit_s, cache_dir=None))
    except OptPipeError:
        return float("inf"), placement, float("inf"), time.perf_counter() - started
    bound = plan.lower_bound_ms or 0.0
    return plan.makespan_ms, placement, bound, time.perf_counter() - started


RECOMPUTE_ANSWER = 0.5
"""Offload time that ours gets against a peer that recomputes."""


def our_offload_time(size: Size, level: float, offload_time: float | None) -> float | None:
    """The transfer speed that ours plans with at a level."""
    if offload_time is None and "recompute" in size.best_peer(level, None).name:
        return RECOMPUTE_ANSWER
    return offload_time


def rows(
    wanted: list[Size], limit_s: float, jobs: int, placements: tuple[str, ...] = PLACEMENTS
) -> Iterator[Row]:
    """Plan every point of the sizes and compare."""
    tasks = [
        (size, level, our_offload_time(size, level, t), placement, limit_s)
        for size in wanted
        for level, t in size.points()
        for placement in placements
    ]
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(_plan, tasks)
        for size in wanted:
            for level, t in size.points():
                found = [next(results) for _ in placements]
                ours, placement, _, _ = min(found)
                peer = size.best_peer(level, t)
                yield Row(
                    size=str(size),
                    level=level,
                    offload_time=t,
                    our_offload_time=our_offload_time(size, level, t),
                    below_1f1b=level < size.peak_1f1b,
                    peer=peer.name,
                    peer_makespan=peer.makespan,
                    ours=ours,
                    placement=placement,
                    bound=min(bound for _, _, bound, _ in found),
                    work=size.work,
                    plan_s=max(seconds for *_, seconds in found),
                )


HEADER = (
    "| size F:B:W | level | t | best peer | peer | ours | placement | bound | idle ratio | s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def render(row: Row) -> str:
    """One line of the table, in Markdown."""
    t = "-" if row.offload_time is None else f"{row.offload_time:g}"
    if row.our_offload_time != row.offload_time:
        t = f"- (ours {row.our_offload_time:g})"
    mark = "" if row.ours <= row.peer_makespan + 1e-6 else " **longer**"
    return (
        f"| {row.size} | {row.level:g} | {t} | {row.peer} | {row.peer_makespan:.2f} | "
        f"{row.ours:.2f}{mark} | {row.placement} | {row.bound:.2f} | {row.idle_ratio:.2f} | "
        f"{row.plan_s:.1f} |"
    )


def verdict(found: list[Row]) -> str:
    """The two claims, counted."""
    longer = [row for row in found if row.ours > row.peer_makespan + 1e-6]
    low = [row for row in found if row.below_1f1b and row.offload_time is not None]
    mean = sum(row.idle_ratio for row in low) / len(low) if low else float("nan")
    return (
        f"{len(found)} levels; longer than the best peer at {len(longer)}; below 1F1B's peak with "
        f"offloading ({len(low)} levels) the idle time is {mean:.3f} of the best peer's on average"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a plan")
    parser.add_argument("--sizes", nargs="*", help="such as 8x16; default: all")
    parser.add_argument("--placements", nargs="*", default=PLACEMENTS, choices=PLACEMENTS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    args = parser.parse_args()
    wanted = [
        size
        for size in sizes()
        if not args.sizes or f"{size.devices}x{size.microbatches}" in args.sizes
    ]
    print(HEADER, flush=True)
    found = []
    for row in rows(wanted, args.time_limit, args.jobs, tuple(args.placements)):
        found.append(row)
        print(render(row), flush=True)
    print(f"\n{verdict(found)}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
