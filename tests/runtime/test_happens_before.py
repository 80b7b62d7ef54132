"""No timing can break a plan: waits are enough (no violation), and each one is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from megatron_optpipe.core import Message, Op, Problem, Program, lower
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.happens_before import History, Thread
from megatron_optpipe.runtime.lanes import Event
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from megatron_optpipe.runtime.traced import TracedLanes, TracedRecorder, TracedTransport
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

    def release(self, ended: Event) -> None:
        pass


class NoStore:
    """Only the order matters here."""

    def saving(self, op: Op) -> AbstractContextManager[None]:
        return nullcontext()

    def using(self, op: Op) -> AbstractContextManager[None]:
        return nullcontext()

    def offload(self, op: Op) -> NoTransfer:
        return NoTransfer()

    def reload(self, op: Op) -> NoTransfer:
        return NoTransfer()


def trace(problem: Problem, programs: Sequence[Program]) -> History:
    net, history = Net(), History()
    carried: dict[Message, dict[Thread, int]] = {}
    lanes = [ThreadLanes(p.device, abort=net.abort, turns=LocalTurns(net)) for p in programs]
    executors = [
        Executor(
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
