"""Programs: they end with blocking sends, and their waits keep the limit at any speed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from megatron_optpipe.core import (
    Compute,
    Deadlock,
    Message,
    Op,
    Plan,
    Problem,
    Program,
    Recv,
    Send,
    lower,
    prove_ends,
)
from tests.zoo import ZOO


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_plan_ends_with_blocking_sends(name: str) -> None:
    p, plan = ZOO[name]()
    prove_ends(lower(p, plan))
    prove_ends(lower(p, plan, kinds=("F",)))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_both_ends_of_a_pair_see_one_order(name: str) -> None:
    p, plan = ZOO[name]()
    seen: dict[tuple[int, int], dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for program in lower(p, plan):
        for item in program.items:
            if isinstance(item, Send | Recv):
                low, high = sorted((item.message.src, item.message.dst))
                seen[low, high][program.device].append(item.message)
    for (low, high), sides in seen.items():
        assert sides[low] == sides[high]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_receive_is_posted_before_its_use_and_a_send_after_its_source(name: str) -> None:
    p, plan = ZOO[name]()
    for program in lower(p, plan):
        posted: set[Op] = set()
        ran: list[Op] = []
        for item in program.items:
            if isinstance(item, Recv):
                posted.add(item.message.producer)
            elif isinstance(item, Send):
                assert ran[-1] == item.message.producer or item.message.producer in ran
            else:
                ran.append(item.op)
                kind, stage, j = item.op
                source = Op(kind, stage - 1 if kind == "F" else stage + 1, j)
                inside = 0 <= source.stage < p.num_stages and kind != "W"
                if inside and p.device_of(source.stage) != program.device:
                    assert source in posted
        assert ran == [op for op, _ in plan.devices[program.device].compute]


def test_sends_that_face_each_other_are_a_deadlock() -> None:
    """Two ranks that each send before they receive, as in a report on another scheduler's plans
    (pytorch issue 172668): fine with buffered sends, stuck when a send waits for its receive."""
    up, down = Message("F", 0, 0, 0, 1), Message("B", 1, 0, 1, 0)
    first = Program(0, (Send(up), Recv(down)), (), (), {})
    second = Program(1, (Send(down), Recv(up)), (), (), {})
    with pytest.raises(Deadlock) as caught:
        prove_ends((first, second))
    assert "send F(0,0) 0->1" in str(caught.value)
    assert "send B(1,0) 1->0" in str(caught.value)


def _run_at_random_speeds(
    p: Problem, plan: Plan, programs: tuple[Program, ...], dice: random.Random
) -> list[int]:
    """Play the programs with random durations; returns the peak bytes of each device.

    Lanes run concurrently; only lane order, messages and ``waits`` hold anything back.
    """
    lanes: list[list[Op]] = []
    for program in programs:
        lanes.append([i.op for i in program.items if isinstance(i, Compute)])
        lanes += [list(program.offload), list(program.reload)]
    waits = {op: needs for program in programs for op, needs in program.waits.items()}
    end: dict[Op, float] = {}
    begin: dict[Op, float] = {}
    place = [0] * len(lanes)
    clock = [0.0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for x, lane in enumerate(lanes):
            while place[x] < len(lane):
                op = lane[place[x]]
                needs = list(waits.get(op, ()))
                if op.kind == "F" and op.stage:
                    needs.append(Op("F", op.stage - 1, op.microbatch))
                if op.kind == "B" and op.stage + 1 < p.num_stages:
                    needs.append(Op("B", op.stage + 1, op.microbatch))
                if any(n not in end for n in needs):
                    break
                at = max([clock[x], *(end[n] for n in needs)])
                begin[op], end[op] = at, at + p.duration_ms(op) * dice.choice((0.05, 1.0, 6.0))
                clock[x] = end[op]
                place[x] += 1
                moved = True
    assert all(place[x] == len(lane) for x, lane in enumerate(lanes))
    peaks = []
    for d in range(p.num_devices):
        events = []
        for op, at in begin.items():
            if p.device_of(op.stage) == d:
                takes, gives = p.memory_change(op)
                events += [(at, 1, takes), (end[op], 0, gives)]
        held = peak = 0
        for _, _, change in sorted(events):
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))


@pytest.mark.parametrize("name", OFFLOADING)
def test_waits_keep_the_limit_at_any_speed(name: str) -> None:
    p, plan = ZOO[name]()
    programs = lower(p, plan)
    dice = random.Random(7)
    for _ in range(60):
        peaks = _run_at_random_speeds(p, plan, programs, dice)
        assert all(peak <= d.memory_bytes for peak, d in zip(peaks, p.devices))


def test_without_memory_waits_the_limit_is_broken() -> None:
    """The test above can fail: drop the waits of the forwards and it does."""
    p, plan = ZOO["offload-all-full-duplex"]()
    programs = tuple(
        replace(q, waits={op: needs for op, needs in q.waits.items() if op.kind != "F"})
        for q in lower(p, plan)
    )
    dice = random.Random(7)
    peaks = [max(_run_at_random_speeds(p, plan, programs, dice)) for _ in range(60)]
    assert max(peaks) > p.devices[0].memory_bytes


def test_plentiful_memory_needs_no_memory_waits() -> None:
    p, plan = ZOO["offload-all-full-duplex"]()
    rich = replace(p, devices=tuple(replace(d, memory_bytes=10**12) for d in p.devices))
    waits = lower(rich, replace(plan, problem_sha256=rich.digest))[0].waits
    assert {op.kind for op in waits} == {"O", "R", "B"}
    assert all(len(needs) == 1 for needs in waits.values())
