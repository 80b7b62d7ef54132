"""No timing can break a plan: waits are enough (no violation), and each one is needed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import pytest

from megatron_optpipe.core import (
    Message,
    Op,
    OptPipeError,
    Plan,
    Problem,
    Program,
    lower,
    require_valid,
    time_orders,
)
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.happens_before import History, Thread
from megatron_optpipe.runtime.lanes import Event, Job
from megatron_optpipe.runtime.thread_lanes import ThreadEvent, ThreadLanes
from megatron_optpipe.runtime.traced import TracedLanes, TracedRecorder, TracedTransport
from tests import zoo
from tests.runtime.local import (
    LocalTransport,
    LocalTurns,
    Net,
    TokenHandlers,
    run_threads,
    without_wait,
)
from tests.zoo import ZOO

OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))


class NoTransfer:
    def allocate(self) -> list[Event]:
        return []

    def copy(self) -> None:
        pass

    def issued(self, ended: Event) -> None:
        pass

    def release(self, ended: Event) -> None:
        pass


class NoStore:
    """Only the order matters here."""

    def saving(self, op: Op) -> AbstractContextManager[None]:
        return nullcontext()

    def using(self, op: Op) -> AbstractContextManager[None]:
        return nullcontext()

    def expect(self, buffers_of_stage: Mapping[int, int]) -> None:
        pass

    def offload(self, op: Op) -> NoTransfer:
        return NoTransfer()

    def reload(self, op: Op) -> NoTransfer:
        return NoTransfer()


def trace(
    problem: Problem,
    programs: Sequence[Program],
    executor_class: type[Executor] = Executor,
    lanes_class: type[ThreadLanes] = ThreadLanes,
    before_copy: Callable[[Op], None] | None = None,
) -> History:
    net, history = Net(), History()
    carried: dict[Message, dict[Thread, int]] = {}
    turns = LocalTurns(net)
    lanes = [
        lanes_class(p.device, abort=net.abort, turns=turns, before_copy=before_copy)
        for p in programs
    ]
    executors = [
        executor_class(
            p,
            TokenHandlers(problem.num_stages - 1),
            TracedTransport(LocalTransport(net), history, p.device, carried),
            TracedLanes(lane, history, p.device),
            NoStore(),
            TracedRecorder(history, p.device),
            net.abort,
        )
        for p, lane in zip(programs, lanes)
    ]
    failures = run_threads(executors, net)
    for lane in lanes:
        lane.close()
    if failures:
        raise failures[0]
    return history


class Deaf:
    """An event that nobody waits for."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class ComputeWaitsForNothing(Executor):
    def _event(self, op: Op) -> Event:
        super()._event(op)
        return Deaf()


class LanesWaitForNothing(ThreadLanes):
    def run(self, job: Job, event: ThreadEvent) -> None:
        super().run(replace(job, waits=(), turns=()), event)


def is_host_wait(op: Op, first: Op) -> bool:
    """Host memory is shared by all devices: its waits are enough, but not the fewest."""
    return op.kind == "O" and first.kind == "R"


def all_waits(problem: Problem, programs: Sequence[Program]) -> Iterator[tuple[Program, Op, Op]]:
    limited = problem.host_memory_bytes is not None
    for program in programs:
        for op, needs in program.waits.items():
            for first in needs:
                if not (limited and is_host_wait(op, first)):
                    yield program, op, first


@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_timing_breaks_a_plan(name: str) -> None:
    problem, plan = ZOO[name]()
    history = trace(problem, lower(problem, plan))
    assert len(history.spans) == sum(len(lane) for d in plan.devices for _, lane in d.lanes())
    assert history.violations(problem) == []


@pytest.mark.parametrize("name", OFFLOADING)
def test_every_single_wait_is_needed(name: str) -> None:
    problem, plan = ZOO[name]()
    programs = lower(problem, plan)
    tried, redundant = 0, []
    for program, op, first in all_waits(problem, programs):
        mutant = list(programs)
        mutant[program.device] = without_wait(program, op, first)
        history = trace(problem, mutant)
        tried += 1
        if history.ordered(first, op):
            redundant.append((op, first))
        else:
            assert history.violations(problem), f"nobody noticed that {op} no longer waits {first}"
    assert tried >= 2 * problem.num_stages * problem.num_microbatches
    assert len(redundant) < tried / 2
    # Which ones follow from the others: the data arrows that memory or link waits already imply.
    assert all(op.kind in "RB" for op, _ in redundant)


def test_waits_for_host_memory_are_noticed() -> None:
    problem, plan = ZOO["offload-host-limit"]()
    mutant = [
        replace(
            p,
            waits={o: tuple(f for f in fs if not is_host_wait(o, f)) for o, fs in p.waits.items()},
        )
        for p in lower(problem, plan)
    ]
    rules = {v.rule for v in trace(problem, mutant).violations(problem)}
    assert rules == {"host"}


@pytest.mark.parametrize("name", OFFLOADING)
def test_an_executor_that_does_not_wait_is_noticed(name: str) -> None:
    problem, plan = ZOO[name]()
    history = trace(problem, lower(problem, plan), executor_class=ComputeWaitsForNothing)
    assert {v.rule for v in history.violations(problem)} & {"race", "memory"}


def test_lanes_that_do_not_wait_are_noticed() -> None:
    problem, plan = ZOO["offload-all-half-duplex"]()
    history = trace(
        problem,
        lower(problem, plan),
        lanes_class=LanesWaitForNothing,
        before_copy=lambda op: time.sleep(0.01 if op.kind == "O" else 0.0),
    )
    assert "event" in {v.rule for v in history.violations(problem)}


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_need_their_waits(seed: int) -> None:
    """Any order, any subset offloaded, memory that just suffices; every wait dropped in turn."""
    problem, plan = random_offloading(seed)
    programs = lower(problem, plan)
    assert trace(problem, programs).violations(problem) == []
    for program, op, first in all_waits(problem, programs):
        mutant = list(programs)
        mutant[program.device] = without_wait(program, op, first)
        history = trace(problem, mutant)
        assert history.ordered(first, op) or history.violations(problem), f"{op} <- {first}"


def random_offloading(seed: int) -> tuple[Problem, Plan]:
    dice = random.Random(seed)
    base = zoo.problem(
        dice.choice([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)]),
        3,
        offload=True,
        duplex=dice.choice(["full", "half", "switch", "one"]),
        gbps=dice.choice([300.0, 1000.0, 3000.0]),
        frees=dice.choice([0.5, 0.25, -0.25, 1.0]),
        p2p_ms=dice.choice([0.0, 0.1]),
    )
    orders = zoo.offload_all(base, zoo.random_topological(base, seed))
    moved = {(op.stage, op.microbatch) for lane in orders.offload for op in lane}
    moved = {key for key in sorted(moved) if dice.random() < 0.7}
    chosen = replace(
        orders,
        offload=tuple(tuple(o for o in lane if o[1:] in moved) for lane in orders.offload),
        reload=tuple(tuple(o for o in lane if o[1:] in moved) for lane in orders.reload),
    )
    for quarters in range(8, 40):
        memory = quarters * zoo.GB // 4
        devices = tuple(replace(device, memory_bytes=memory) for device in base.devices)
        problem = replace(base, devices=devices)
        with suppress(OptPipeError):
            plan = time_orders(problem, chosen, method=f"random {seed}")
            require_valid(problem, plan)
            return problem, plan
    raise AssertionError("ten activations suffice")
