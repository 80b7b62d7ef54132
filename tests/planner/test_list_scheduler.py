"""The list scheduler: never stuck, both readings, plain and compiled alike, memory to the byte."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_optpipe.core import Device, Problem, check, summarize
from megatron_optpipe.planner.families import Family, known_shapes, random_shape
from megatron_optpipe.planner.feasible import Infeasible, modes
from megatron_optpipe.planner.listsched import ListScheduler, compiled_for
from megatron_optpipe.planner.portfolio import first_shapes
from megatron_optpipe.planner.realise import realise
from tests.planner.test_fuzz import random_problem
from tests.zoo import GB, problem

SEEDS = range(150)


def _schedules(p: Problem, seed: int, many: int = 4):  # type: ignore[no-untyped-def]
    """Schedules from random keys, of every reading of a problem (strict orders and activations kept
    from leaving may get stuck: they are asked of the scheduler, and it says so)."""
    dice = random.Random(seed)
    for mode in modes(p):
        for flat in (mode.readings.forward, mode.readings.mirrored):
            family = Family(flat, mode.may_leave)
            scheduler = ListScheduler(flat, compiled=False)
            for _ in range(many):
                shape = random_shape(dice, p.num_devices, p.num_microbatches)
                yield flat, shape, scheduler.run(*family.keys(replace(shape, slack=99.0, keep=0)))


def test_random_keys_on_random_problems_are_never_stuck_and_always_valid() -> None:
    """Whatever the keys, placement, links, limits, host memory and direction of time."""
    built = 0
    for seed in SEEDS:
        p = random_problem(seed)
        try:
            for flat, shape, times in _schedules(p, seed):
                assert times is not None, f"seed {seed}: stuck with {shape}"
                assert check(p, realise(p, flat, times, "test")) == [], f"seed {seed}: {shape}"
                built += 1
        except Infeasible:
            continue
    assert built > 4 * len(SEEDS)


@pytest.mark.parametrize(
    ("owners", "least"), [((0, 1), 1.0), ((0, 1, 0, 1), 1.0), ((0, 1, 1, 0), 1.0)]
)
def test_the_least_memory_of_all_is_enough_with_offload(
    owners: tuple[int, ...], least: float
) -> None:
    p = problem(owners, 5, memory=least, offload=True)
    for flat, shape, times in _schedules(p, 7, many=20):
        assert times is not None, shape
        plan = realise(p, flat, times, "test")
        assert check(p, plan) == []
        assert max(summarize(p, plan).peak_bytes) <= least * GB


def test_without_offload_every_chunk_of_one_microbatch_must_fit() -> None:
    p = problem((0, 1, 0, 1), 5, memory=2.0)
    for flat, shape, times in _schedules(p, 3, many=20):
        assert times is not None, shape
        assert check(p, realise(p, flat, times, "test")) == []
    short = replace(p, devices=(Device(2 * GB), Device(2 * GB - 1)))
    with pytest.raises(Infeasible, match=rf"devices\[1\].*at least {2 * GB}"):
        modes(short)


def test_host_memory_too_small_for_what_must_leave_names_the_least() -> None:
    p = problem((0, 1, 0, 1), 4, memory=1.0, offload=True, host=2.0)
    for flat, shape, times in _schedules(p, 5, many=10):
        assert times is not None, shape
        assert check(p, realise(p, flat, times, "test")) == []
    with pytest.raises(Infeasible, match=rf"host_memory_bytes.*at least {2 * GB}"):
        modes(replace(p, host_memory_bytes=2 * GB - 1))


def test_strict_slack_keeps_the_order_of_keys() -> None:
    """With slack 0 a device never runs an F or B before one of smaller key."""
    p = problem((0, 1, 2, 3), 6)
    mode = modes(p)[0]
    flat = mode.readings.forward
    family = Family(flat, mode.may_leave)
    shapes = [s for s in known_shapes(family) if s.slots]
    for shape in shapes:
        keys, rules = family.keys(shape)
        times = ListScheduler(flat, compiled=False).run(keys, rules._replace(slack=0))
        assert times is not None
        for d in range(4):
            mine = slice(d * 6, d * 6 + 6)
            starts = np.concatenate((times.x[mine], times.y[mine]))
            wanted = np.concatenate((keys.x[mine], keys.y[mine]))
            assert (np.diff(wanted[np.argsort(starts)]) >= 0).all()


def test_compiled_and_plain_give_the_same_schedules() -> None:
    pytest.importorskip("numba")
    assert compiled_for(float("inf"))
    for seed in SEEDS[:40]:
        p = random_problem(seed)
        try:
            readings = modes(p)
        except Infeasible:
            continue
        for mode in readings:
            for flat in (mode.readings.forward, mode.readings.mirrored):
                family = Family(flat, mode.may_leave)
                both = [ListScheduler(flat, compiled=c) for c in (False, True)]
                for shape in first_shapes(family)[::3]:
                    plain, fast = (s.run(*family.keys(shape)) for s in both)
                    assert (plain is None) == (fast is None), f"seed {seed}: {shape}"
                    if plain is not None and fast is not None:
                        for one, two in zip(plain, fast):
                            assert np.array_equal(one, two), f"seed {seed}: {shape}"
