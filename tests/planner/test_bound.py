"""Lower bounds: no argument claims too much, and each says what it should where it should."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from megatron_optpipe.core import Device, Link, Op, Problem, Stage
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.bound import ARCS, ENERGY, WORK, lower_bound, work_bound
from megatron_optpipe.planner.bound_device import (
    preemptive_makespan_ms,
    reach_of,
    work_bound_ms,
)
from megatron_optpipe.planner.bound_energy import energy_bound_ms
from megatron_optpipe.planner.bound_memory import NeverFits, memory_arcs
from megatron_optpipe.planner.bound_pending import pending_bound_ms
from megatron_optpipe.planner.bound_period import memory_reach_of, releases_before
from megatron_optpipe.planner.exact import solve_exactly
from megatron_optpipe.planner.network import Network
from tests.planner.small_problems import small_problem

SIZE = 1_000_000


def _pipeline(
    devices: int, many: int, units: float, transfer_ms: float | None = None, shared: bool = False
) -> Problem:
    stage = Stage(1.0, 1.0, 1.0, SIZE, SIZE // 2, SIZE if transfer_ms else 0)
    rooms, links = [], {}
    for d in range(devices):
        if transfer_ms is None:
            rooms.append(Device(int(units * SIZE)))
            continue
        pair = 0 if shared else d
        for way in ("out", "back"):
            links[f"{way}{pair}"] = Link(SIZE / (transfer_ms * 1e6))
        rooms.append(Device(int(units * SIZE), f"out{pair}", f"back{pair}"))
    return Problem(many, tuple(range(devices)), (stage,) * devices, tuple(rooms), links, 0.1)


def test_every_argument_is_below_the_optimum_of_small_problems() -> None:
    """With and without offload, each argument alone, seeds other than those of test_settle."""
    proven = 0
    for seed in range(1000, 1300):
        problem = small_problem(seed)
        start = make_plan(problem, PlannerOptions(method="greedy"))
        exact = solve_exactly(problem, start, 60.0, max_states=300)
        best = (exact.plan or start).makespan_ms
        proven += exact.proven
        reach = reach_of(problem)
        tied = memory_reach_of(problem, reach) or reach
        work = work_bound_ms(problem, reach)
        for name, bound in {
            "work": work,
            "period": work_bound_ms(problem, tied),
            "pending": pending_bound_ms(problem, reach),
            "energy": energy_bound_ms(problem, reach, work),
            "all": lower_bound(problem).ms,
            "below a known plan": lower_bound(problem, 2.0, best).ms,
        }.items():
            assert bound <= best + 1e-6, f"seed {seed}: {name}"
    assert proven > 200, "most of these were compared with a proven optimum"


def test_preemptive_bound_is_the_best_of_all_orders_or_less() -> None:
    rng = random.Random(7)
    for _ in range(100):
        count = rng.randint(1, 5)
        heads = [rng.randint(0, 9) / 2 for _ in range(count)]
        lasts = [rng.randint(0, 6) / 2 for _ in range(count)]
        tails = [rng.randint(0, 9) / 2 for _ in range(count)]
        best = float("inf")
        for order in itertools.permutations(range(count)):
            now = latest = 0.0
            for i in order:
                now = max(now, heads[i]) + lasts[i]
                latest = max(latest, now + tails[i])
            best = min(best, latest)
        bound = preemptive_makespan_ms(heads, lasts, tails)
        assert bound <= best + 1e-9
        assert bound >= max(h + p + q for h, p, q in zip(heads, lasts, tails)) - 1e-9
        assert bound >= min(heads) + sum(lasts) + min(tails) - 1e-9


def test_closed_form_heads_and_tails_equal_longest_paths() -> None:
    for seed in range(60):
        problem = small_problem(seed)
        network = Network.of_compute(problem)
        reach = reach_of(problem)
        for i, (head, tail) in enumerate(zip(network.heads(), network.tails())):
            kind, s, j = network.ops[i]
            assert reach.head[kind][s][j] == pytest.approx(head)
            assert reach.tail[kind][s][j] == pytest.approx(tail)


def test_memory_arcs_tie_forwards_to_earlier_backwards() -> None:
    problem = _pipeline(4, 8, 2.0)
    assert releases_before(problem, 0) == (2, 3, 3)
    network = Network.of_compute(problem)
    arcs = {(network.ops[a], network.ops[b]) for a, b, _ in memory_arcs(network)}
    assert (Op("B", 0, 1), Op("F", 0, 3)) in arcs
    assert (Op("W", 0, 0), Op("F", 0, 3)) in arcs
    roomy = _pipeline(4, 8, 8.0)
    assert memory_arcs(Network.of_compute(roomy)) == []
    assert memory_reach_of(roomy, reach_of(roomy)) is None


def test_tight_memory_gives_the_bound_of_the_period() -> None:
    loose, tight = lower_bound(_pipeline(8, 16, 16.0)), lower_bound(_pipeline(8, 16, 3.0))
    assert loose.reason == WORK
    assert tight.reason == ARCS
    assert tight.ms > 1.8 * loose.ms
    longer = lower_bound(_pipeline(8, 64, 3.0)).ms
    period = (longer - tight.ms) / 48  # every third forward waits for a round trip
    assert period == pytest.approx(5.8, abs=0.2)


def test_large_problems_use_the_same_arcs_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _pipeline(8, 16, 5.0)
    full = lower_bound(problem)
    monkeypatch.setattr("megatron_optpipe.planner.bound.MAX_ARC_OPS", 0)
    closed = lower_bound(problem)
    assert closed.reason == ARCS
    assert closed.ms == pytest.approx(full.ms)


def test_slow_links_bound_what_offloading_can_save() -> None:
    fast, slow = lower_bound(_pipeline(8, 32, 2.0, 0.3)), lower_bound(_pipeline(8, 32, 2.0, 2.0))
    shared = lower_bound(_pipeline(8, 32, 2.0, 2.0, shared=True))
    without = lower_bound(_pipeline(8, 32, 2.0))
    assert slow.reason == shared.reason == ENERGY
    assert fast.ms < slow.ms < shared.ms <= without.ms + 1e-6


def test_weight_gradients_that_wait_hold_memory() -> None:
    """Two units: beside the activations of the last B only two W can wait on the last device."""
    problem = _pipeline(8, 16, 2.0, 0.9)
    bound = pending_bound_ms(problem, reach_of(problem))
    # seven forwards and hops; all of the 48 ms but that B, its W and two more; its way back up
    assert bound == pytest.approx(7.7 + 48 - 4 + 1 + 7.7 + 1)
    two_chunks = replace(
        problem,
        stage_device=(*range(8), *range(8)),
        stages=tuple(
            replace(
                stage,
                forward_ms=0.5,
                backward_input_ms=0.5,
                backward_weight_ms=0.5,
                activation_bytes=SIZE // 2,
                backward_frees_bytes=SIZE // 4,
                offload_bytes=SIZE // 2,
            )
            for stage in problem.stages * 2
        ),
    )
    assert lower_bound(two_chunks).ms > work_bound(two_chunks).ms + 1.0


def test_no_plan_at_all_is_said() -> None:
    problem = _pipeline(2, 2, 1.0)
    half = replace(problem, devices=(Device(SIZE // 2), Device(SIZE)))
    with pytest.raises(NeverFits):
        memory_arcs(Network.of_compute(half))
    assert lower_bound(half).ms == float("inf")


def test_work_bound_counts_ramps_and_uneven_stages() -> None:
    problem = _pipeline(4, 8, 99.0)
    # the last device starts after three forwards and hops, the first ends three B and hops later
    assert work_bound(problem).ms == pytest.approx(24 + 3 * 1.1)
    heavy = replace(problem.stages[0], forward_ms=2.0)
    uneven = replace(problem, stages=(heavy, *problem.stages[1:]))
    assert work_bound(uneven).ms > work_bound(problem).ms + 4
