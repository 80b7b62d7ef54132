"""Stock Megatron against plans of every kind, all in one process group.

Bytes are measured by the job itself; times are fixed, so that every run of the tests makes the
same plans.
"""

from __future__ import annotations

import copy
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_optpipe.core import (
    Device,
    Link,
    Op,
    Orders,
    Plan,
    Problem,
    load_problem,
    require_valid,
    summarize,
    time_orders,
)
from megatron_optpipe.megatron import engine
from megatron_optpipe.megatron.job import load_job, with_memory
from megatron_optpipe.megatron.schedule import PipelineRun
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.orders import interleaved, one_f_one_b, zb_h1, zb_h2
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from tests.zoo import all_forwards_first, random_topological

Case = tuple[str, Callable[..., Any], Callable[[], dict[str, Any]] | None]

TIGHT = 0.6
"""The memory limit of the offloading plan, as a part of (interleaved) 1F1B's peak."""

SLOW_COPY_S = 0.01


def cases(args: Namespace, stock: Callable[..., Any], out: Path) -> Iterator[Case]:
    """Stock, the measuring run, classic orders, the adversary, offloading, slowed offloading."""
    yield "stock", stock, None
    measuring = copy.copy(args)
    measuring.optpipe_write_problem = str(out / "measured.json")
    job = load_job(measuring)
    assert job.plan is not None
    yield "measuring", PipelineRun(job.problem, job.plan, measuring), None
    problem = with_fixed_times(load_problem(out / "measured.json"))
    for name, orders in orders_of(problem).items():
        plan = time_orders(problem, orders, method=name)
        yield name, *logged(problem, plan, args, out / name)
    classic = time_orders(problem, next(iter(orders_of(problem).values())), method="classic")
    tight = with_memory(problem, int(TIGHT * max(summarize(problem, classic).peak_bytes)))
    plan = make_plan(tight, PlannerOptions(method="greedy"))
    assert sum(summarize(tight, plan).moved_bytes) > 0, "the limit must force offloads"
    yield "offloading", *logged(tight, plan, args, out / "offloading")
    if problem.num_stages > problem.num_devices:
        return
    slow = partial(ThreadLanes, before_copy=lambda _: time.sleep(SLOW_COPY_S))
    engine.ThreadLanes = slow  # type: ignore[assignment,misc]
    try:
        yield "slow-copies", *logged(tight, plan, args, out / "slow-copies")
    finally:
        engine.ThreadLanes = ThreadLanes  # type: ignore[misc]


def orders_of(problem: Problem) -> dict[str, Orders]:
    """Classic orders that fit the placement, first the plainest, last the adversary."""
    adversary = {"adversary": random_topological(problem, 1)}
    zero_bubble = {"zb-h1": zb_h1(problem), "zb-h2": zb_h2(problem)}
    if problem.num_stages > problem.num_devices:
        weights_late = all_forwards_first(problem, weights_last=True)
        late = {"weights-last": weights_late}
        return {"1f1b": interleaved(problem), **zero_bubble, **late, **adversary}
    return {"1f1b": one_f_one_b(problem), **zero_bubble, **adversary}


def with_fixed_times(measured: Problem) -> Problem:
    """The measured bytes with round times, links and endless memory."""
    stages = tuple(
        replace(s, forward_ms=1.0, backward_input_ms=1.2, backward_weight_ms=0.8)
        for s in measured.stages
    )
    per_ms = max(s.activation_bytes for s in stages)
    links = {name: Link(per_ms / 1e6) for name in measured.links}
    devices = tuple(Device(10**12, d.d2h, d.h2d) for d in measured.devices)
    return replace(measured, stages=stages, links=links, devices=devices, p2p_ms=0.1)


def logged(problem: Problem, plan: Plan, args: Namespace, folder: Path) -> tuple[Any, Any]:
    """A run under the plan, and what to report of it: planned and measured bytes of this rank."""
    require_valid(problem, plan)
    args = copy.copy(args)
    args.optpipe_log_dir = str(folder)

    def bytes_of_this_rank() -> dict[str, Any]:
        # Global ranks are pipeline ranks here: no data or tensor parallelism in these layouts.
        rank = torch.distributed.get_rank()
        planned = summarize(problem, plan)
        document = json.loads((folder / f"measured-rank{rank}.json").read_text())
        num_offloads = sum(op.kind == "O" for op, _ in plan.devices[rank].offload)
        assert len(document["offload"]) == num_offloads
        assert {Op(*entry[:3]) for entry in document["compute"]} == {
            op for op, _ in plan.devices[rank].compute
        }
        return {
            "limit_bytes": problem.devices[rank].memory_bytes,
            "planned_peak_bytes": planned.peak_bytes[rank],
            "planned_moved_bytes": planned.moved_bytes[rank],
            "peak_bytes": [entry["peak_bytes"] for entry in document["iterations"]],
            "moved_bytes": [entry["moved_bytes"] for entry in document["iterations"]],
        }

    return PipelineRun(problem, plan, args), bytes_of_this_rank
