"""Random problems, over a thousand with a plan: no crash, no invalid plan, none worse than classic.

A seed that fails is printed; ``random_problem(seed)`` makes its problem again.
"""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from megatron_optpipe.core import (
    Deadlock,
    Device,
    Link,
    OptPipeError,
    Problem,
    Stage,
    check,
    lower,
    prove_ends,
    time_orders,
)
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.bound import lower_bound
from megatron_optpipe.planner.feasible import Infeasible
from megatron_optpipe.planner.orders import CLASSIC_ORDERS

PROBLEMS, BATCH = 1400, 140
MB = 10**6


def random_problem(seed: int) -> Problem:
    """Any placement, uneven stages, any links, hops by number or matrix, odd byte counts."""
    dice = random.Random(seed)
    devices = dice.randint(1, 4)
    chunks = dice.choice((1, 1, 2, 3))
    runs = [list(range(devices)) for _ in range(chunks)]
    shape = dice.choice(("interleaved", "v", "shuffled"))
    for index, run in enumerate(runs):
        if shape == "v" and index % 2:
            run.reverse()
        if shape == "shuffled":
            dice.shuffle(run)
    owners = tuple(d for run in runs for d in run)
    offload = dice.random() < 0.6
    stages = []
    for index in range(len(owners)):
        heavy = 1.4 if index in (0, len(owners) - 1) else 1.0
        size = dice.choice((0, 1, 7, 10, 10, 10, 13)) * MB
        moved = dice.choice((0, size, size, size // 2)) if offload else 0
        stages.append(
            Stage(
                forward_ms=heavy * dice.choice((0.001, 1.0, 1.0, dice.uniform(0.1, 3.0))),
                backward_input_ms=heavy * dice.choice((1.2, dice.uniform(0.1, 3.0))),
                backward_weight_ms=dice.choice((0.0, 0.8, dice.uniform(0.0, 3.0))),
                activation_bytes=size,
                backward_frees_bytes=dice.choice((size, size // 2, 0, -3 * MB)),
                offload_bytes=moved,
                offload_wire_bytes=dice.choice((None, moved // 2)) if moved else None,
            )
        )
    layout = dice.choice(("full", "half", "switch", "one"))
    ports: list[tuple[str | None, str | None]] = []
    for d in range(devices):
        names = {
            "full": (f"out{d}", f"in{d}"),
            "half": (f"pcie{d}", f"pcie{d}"),
            "switch": (f"out{d // 2}", f"in{d // 2}"),
            "one": ("bus", "bus"),
        }[layout]
        ports.append(names if offload and dice.random() < 0.9 else (None, None))
    speeds = {name for pair in ports for name in pair if name is not None}
    links = {
        name: Link(dice.choice((1.0, 5.0, 20.0)), dice.choice((0.0, 0.05)))
        for name in sorted(speeds)
    }
    hop: float | tuple[tuple[float, ...], ...] = dice.choice((0.0, 0.1, 1.5))
    if dice.random() < 0.2:
        hop = tuple(
            tuple(0.0 if a == b else dice.uniform(0.0, 1.0) for b in range(devices))
            for a in range(devices)
        )
    return Problem(
        num_microbatches=dice.randint(1, 7),
        stage_device=owners,
        stages=tuple(stages),
        devices=tuple(
            Device(dice.choice((8, 16, 25, 40, 70, 1000)) * MB * dice.choice((1, chunks)), *port)
            for port in ports
        ),
        links=links,
        p2p_ms=hop,
        host_memory_bytes=dice.choice((None, None, None, 0, 10 * MB, 60 * MB)),
    )


def _classic(problem: Problem) -> dict[str, float]:
    """Makespan of each classic order that obeys every rule of this problem."""
    found = {}
    for name, orders in CLASSIC_ORDERS.items():
        try:
            found[name] = time_orders(problem, orders(problem), method=name).makespan_ms
        except (Deadlock, OptPipeError):
            continue
    return found


@pytest.mark.parametrize("first", range(0, PROBLEMS, BATCH))
def test_random_problems(first: int) -> None:
    refused = 0
    for seed in range(first, first + BATCH):
        problem = random_problem(seed)
        method = ("adaoffload", "search")[seed % 2]
        options = PlannerOptions(method=method, time_limit_s=0.03, seed=seed)
        classic = _classic(problem)
        try:
            plan = make_plan(problem, options)
        except Infeasible as refusal:
            refused += 1
            assert not classic, f"seed {seed}: refused, but {sorted(classic)} fit"
            assert "\n" not in str(refusal), f"seed {seed}"
            continue
        assert check(problem, plan) == [], f"seed {seed}"
        prove_ends(lower(problem, plan))
        assert lower_bound(problem, 0.0).ms <= plan.makespan_ms + 1e-6, f"seed {seed}"
        if method == "search" and classic:
            assert plan.makespan_ms <= min(classic.values()) + 1e-6, f"seed {seed}"
    print(f"seeds {first} to {first + BATCH - 1}: {refused} without a plan")
    assert refused < BATCH // 2


def test_the_limit_that_a_refusal_names_is_the_smallest_that_would_do() -> None:
    """Raise every named limit to what the refusal says: a plan is found; a byte less: refused."""
    seen = 0
    for seed in range(400):
        problem = random_problem(seed)
        if problem.host_memory_bytes is not None:
            continue
        while True:
            try:
                make_plan(problem, PlannerOptions(method="greedy"))
                break
            except Infeasible as refusal:
                told = re.search(r"devices\[(\d+)\].* at least (\d+)$", str(refusal))
                assert told is not None, str(refusal)
                index, least = int(told[1]), int(told[2])
                devices = list(problem.devices)
                devices[index] = dataclasses.replace(devices[index], memory_bytes=least - 1)
                with pytest.raises(Infeasible):
                    make_plan(
                        dataclasses.replace(problem, devices=tuple(devices)),
                        PlannerOptions(method="greedy"),
                    )
                devices[index] = dataclasses.replace(devices[index], memory_bytes=least)
                problem = dataclasses.replace(problem, devices=tuple(devices))
                seen += 1
    assert seen > 50
