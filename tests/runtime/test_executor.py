"""The executor with a real model on every odd plan: same numbers, and faults that end everybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_optpipe.core import Op, Plan, Problem, Program, lower
from megatron_optpipe.runtime.codecs import Identity
from megatron_optpipe.runtime.executor import Executor, consumer_of
from megatron_optpipe.runtime.faults import RuntimeFault
from megatron_optpipe.runtime.recorder import Recorder
from megatron_optpipe.runtime.store import ActivationStore
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from tests.runtime.local import LocalTransport, LocalTurns, Net, TokenHandlers, run_threads
from tests.runtime.toy import ToyHandlers, make_inputs, make_stages, reference
from tests.zoo import ZOO

OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))


class Job:
    """All devices of a plan with the toy model, as threads."""

    def __init__(
        self,
        problem: Problem,
        programs: tuple[Program, ...],
        *,
        rendezvous: bool = False,
        before_copy: Callable[[Op], None] | None = None,
    ) -> None:
        self.net = Net()
        self.stages = make_stages(problem.num_stages)
        inputs = make_inputs(problem.num_microbatches)
        parameters = [p for stage in self.stages for p in stage.parameters()]
        self.stores = [ActivationStore(parameters=parameters, min_bytes=1) for _ in programs]
        self.recorders = [Recorder(p.device) for p in programs]
        turns = LocalTurns(self.net)
        self.lanes = [
            ThreadLanes(
                p.device, abort=self.net.abort, recorder=r, turns=turns, before_copy=before_copy
            )
            for p, r in zip(programs, self.recorders)
        ]
        self.handlers = [ToyHandlers(problem, self.stages, inputs, s) for s in self.stores]
        transports = [LocalTransport(self.net, rendezvous=rendezvous) for _ in programs]
        self.executors = [
            Executor(*parts, self.net.abort)
            for parts in zip(
                programs, self.handlers, transports, self.lanes, self.stores, self.recorders
            )
        ]

    def run(self) -> list[BaseException]:
        for store, recorder in zip(self.stores, self.recorders):
            store.start()
            recorder.start()
        return run_threads(self.executors, self.net)

    def grads(self) -> list[Tensor]:
        return [p.grad for s in self.stages for p in s.parameters() if p.grad is not None]

    def close(self) -> None:
        for lanes in self.lanes:
            lanes.close()


def assert_same_numbers(job: Job, problem: Problem) -> None:
    losses, grads = reference(problem)
    last = next(h for h in job.handlers if h.losses)
    assert last.losses == losses
    for one, two in zip(job.grads(), grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_losses_and_gradients_are_those_of_plain_autograd(name: str, rendezvous: bool) -> None:
    problem, plan = ZOO[name]()
    job = Job(problem, lower(problem, plan), rendezvous=rendezvous)
    assert job.run() == []
    assert_same_numbers(job, problem)
    for store, recorder, device in zip(job.stores, job.recorders, plan.devices):
        ops = {op for _, lane in device.lanes() for op, _ in lane}
        assert set(recorder.times_ms) == ops
        compute = sorted((t, op) for op, t in recorder.times_ms.items() if op.kind in "FBW")
        assert [op for _, op in compute] == [op for op, _ in device.compute]
        assert (store.moved_bytes > 0) == bool(device.offload)
        assert store.resident_bytes == 0
        assert store.peak_bytes > 0
    job.close()


@pytest.mark.parametrize("slow", ["O", "R", "OR"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_slow_copies_change_nothing(name: str, slow: str) -> None:
    problem, plan = ZOO[name]()
    job = Job(
        problem,
        lower(problem, plan),
        before_copy=lambda op: time.sleep(0.01 if op.kind in slow else 0.0),
    )
    assert job.run() == []
    assert_same_numbers(job, problem)
    job.close()


@pytest.mark.parametrize("name", OFFLOADING)
def test_nothing_grows_after_the_second_iteration(name: str) -> None:
    problem, plan = ZOO[name]()
    dice = iter(range(10**6))
    job = Job(
        problem,
        lower(problem, plan),
        before_copy=lambda _: time.sleep((next(dice) * 7 % 5) * 0.001),
    )
    reserved = []
    for _ in range(5):
        assert job.run() == []
        reserved.append([store.pool.reserved_bytes for store in job.stores])
        assert all(store.freed_bytes > 0.5 * store.moved_bytes for store in job.stores)
    assert reserved[1] == reserved[4]
    assert all(s.pool.peak_requested_bytes <= s.pool.reserved_bytes for s in job.stores)
    job.close()


def test_offloading_lowers_the_peak() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    everything = Job(problem, lower(problem, _without_offload(plan)))
    assert everything.run() == []
    some = Job(problem, lower(problem, plan))
    assert some.run() == []
    for kept, moved in zip(everything.stores, some.stores):
        assert moved.peak_bytes < 0.8 * kept.peak_bytes
    everything.close()
    some.close()


def _without_offload(plan: Plan) -> Plan:
    return replace(plan, devices=tuple(replace(d, offload=(), reload=()) for d in plan.devices))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_evaluation_runs_forwards_only(name: str) -> None:
    problem, plan = ZOO[name]()
    job = Job(problem, lower(problem, plan, kinds=("F",)))
    assert job.run() == []
    losses, _ = reference(problem)
    assert next(h for h in job.handlers if h.losses).losses == losses
    assert job.grads() == []
    job.close()


class FailingHandlers(TokenHandlers):
    def __init__(self, last_stage: int, fail_at: Op) -> None:
        super().__init__(last_stage)
        self.fail_at = fail_at

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        if op == self.fail_at:
            raise ValueError("bad batch")
        return super().forward(op, received)

    def backward_weight(self, op: Op) -> None:
        if op == self.fail_at:
            raise ValueError("bad batch")


def tokens(problem: Problem, plan: Plan, handlers: TokenHandlers) -> tuple[Net, list[Executor]]:
    net = Net()
    executors = []
    for program in lower(problem, plan):
        lanes = ThreadLanes(program.device, abort=net.abort, turns=LocalTurns(net))
        store = ActivationStore()
        executors.append(
            Executor(program, handlers, LocalTransport(net), lanes, store, abort=net.abort)
        )
    return net, executors


@pytest.mark.parametrize("fail_at", [Op("F", 2, 1), Op("W", 3, 0)])
def test_a_fault_ends_every_device_by_name(fail_at: Op) -> None:
    problem, plan = ZOO["adversary-4"]()
    net, executors = tokens(problem, plan, FailingHandlers(problem.num_stages - 1, fail_at))
    failures = run_threads(executors, net)
    place = [op for op, _ in plan.devices[fail_at.stage].compute].index(fail_at) + 1
    assert failures
    for failure in failures:
        assert isinstance(failure, RuntimeFault)
        assert f"rank {fail_at.stage} failed at op {fail_at}" in str(failure)
        assert f"position {place} of 18 compute ops" in str(failure)
        assert "ValueError: bad batch" in str(failure)
        assert (failure.rank, failure.op) == (fail_at.stage, fail_at)


class BrokenCodec(Identity):
    def encode(self, raw: Tensor, wire: Tensor) -> None:
        raise RuntimeError("copy engine on fire")


def test_a_fault_in_a_lane_ends_every_device_by_name() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    job = Job(problem, lower(problem, plan))
    job.stores[2].codec = BrokenCodec()
    failures = job.run()
    assert len(failures) == problem.num_devices
    for failure in failures:
        assert "rank 2 failed at op O(2,0), transfer 1 of its offload lane" in str(failure)
        assert "copy engine on fire" in str(failure)
    job.close()


def test_host_memory_that_runs_out_is_said_with_numbers() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    job = Job(problem, lower(problem, plan))
    job.stores[1].pool.budget_bytes = 1000
    failures = job.run()
    assert all("the budget is 1000" in str(f) and "rank 1 failed" in str(f) for f in failures)
    assert len(failures) == problem.num_devices
    job.close()


class Silent(TokenHandlers):
    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        return None


def test_a_missing_output_is_named() -> None:
    problem, plan = ZOO["one-at-a-time"]()
    net, executors = tokens(problem, plan, Silent(problem.num_stages - 1))
    failures = run_threads(executors, net)
    assert "rank 0 failed at op F(0,0)" in str(failures[0])
    assert "F(1,0) needs its output" in str(failures[0])


def test_who_takes_an_output() -> None:
    assert consumer_of(Op("F", 1, 3)) == Op("F", 2, 3)
    assert consumer_of(Op("B", 1, 3)) == Op("B", 0, 3)


def test_overhead_is_what_is_neither_work_nor_waiting() -> None:
    problem, plan = ZOO["single-device"]()
    net, (executor,) = tokens(problem, plan, TokenHandlers(problem.num_stages - 1))
    assert run_threads([executor], net) == []
    times = executor.times
    assert 0.0 < times.handlers_s + times.waiting_s <= times.total_s
    assert times.overhead_s == times.total_s - times.handlers_s - times.waiting_s
