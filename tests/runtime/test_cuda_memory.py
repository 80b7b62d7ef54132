"""The CUDA lanes keep the memory limit (rule 7) in the order in which the host takes and gives."""

from __future__ import annotations

import threading

import pytest
from torch import Tensor

from megatron_optpipe.core import Op, Plan, Problem, lower
from megatron_optpipe.runtime.cuda_lanes import CudaJobEvent, CudaLanes
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.lanes import Event
from megatron_optpipe.runtime.turns import takes_turns
from tests.runtime.fake_cuda import Gpu, Stream
from tests.runtime.local import LocalTransport, LocalTurns, Net, TokenHandlers, run_threads
from tests.runtime.test_happens_before import NoStore, NoTransfer, random_offloading
from tests.zoo import ZOO

OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))

NEED_EARLIER_OFFLOADS = (0, 7, 11, 13, 17, 41)
"""Random plans in which an allocation counts on offloads that nobody waits for by name."""


class Meter:
    """Bytes that a device holds, changed when the host issues what takes or gives them."""

    def __init__(self, problem: Problem) -> None:
        self.held_bytes = 0
        self.peak_bytes = 0
        self._problem = problem
        self._lock = threading.Lock()

    def take(self, op: Op) -> None:
        with self._lock:
            self.held_bytes += self._problem.memory_change(op).at_start_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, op: Op) -> None:
        with self._lock:
            self.held_bytes += self._problem.memory_change(op).at_end_bytes


class MeteredTransfer(NoTransfer):
    """A reload takes memory when it is issued, an offload gives it when it is released."""

    def __init__(self, op: Op, meter: Meter, gpu: Gpu) -> None:
        self._op = op
        self._meter = meter
        self._gpu = gpu

    def allocate(self) -> list[Event]:
        self._meter.take(self._op)
        return []

    def copy(self) -> None:
        self._gpu.current.stream.put(lambda: None)

    def release(self, ended: Event) -> None:
        assert isinstance(ended, CudaJobEvent)
        assert ended.issued.is_set(), f"{self._op} was released before it was issued"
        self._meter.give(self._op)


class MeteredStore(NoStore):
    def __init__(self, meter: Meter, gpu: Gpu) -> None:
        self._meter = meter
        self._gpu = gpu

    def offload(self, op: Op) -> MeteredTransfer:
        return MeteredTransfer(op, self._meter, self._gpu)

    def reload(self, op: Op) -> MeteredTransfer:
        return MeteredTransfer(op, self._meter, self._gpu)


class MeteredHandlers(TokenHandlers):
    def __init__(self, last_stage: int, meter: Meter) -> None:
        super().__init__(last_stage)
        self._meter = meter

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        self._meter.take(op)
        output = super().forward(op, received)
        self._meter.give(op)
        return output

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        self._meter.take(op)
        output = super().backward_input(op, received)
        self._meter.give(op)
        return output

    def backward_weight(self, op: Op) -> None:
        self._meter.take(op)
        self._meter.give(op)


def peaks(problem: Problem, plan: Plan, gpu: Gpu, iterations: int = 2) -> list[int]:
    """The most bytes that each device held; nothing is held between iterations."""
    programs, net = lower(problem, plan), Net()
    executors, every_lane, meters = [], [], []
    for program in programs:
        gpu.current.stream = Stream(gpu, immediate=True)
        turns = LocalTurns(net) if takes_turns(programs, program.device) else None
        lanes = CudaLanes(program.device, abort=net.abort, turns=turns)
        meter = Meter(problem)
        handlers = MeteredHandlers(problem.num_stages - 1, meter)
        transport, store = LocalTransport(net), MeteredStore(meter, gpu)
        executors.append(Executor(program, handlers, transport, lanes, store, abort=net.abort))
        every_lane.append(lanes)
        meters.append(meter)
    for _ in range(iterations):
        assert run_threads(executors, net) == []
        assert [meter.held_bytes for meter in meters] == [0] * len(meters)
    for lanes in every_lane:
        lanes.close()
    return [meter.peak_bytes for meter in meters]


def within_limits(problem: Problem, plan: Plan, gpu: Gpu) -> bool:
    limits = [device.memory_bytes for device in problem.devices]
    return all(peak <= most for peak, most in zip(peaks(problem, plan, gpu), limits, strict=True))


@pytest.mark.parametrize("eagerness", [0.0, 0.3])
@pytest.mark.parametrize("name", OFFLOADING)
def test_a_plan_keeps_the_limit_on_late_streams(
    name: str, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(eagerness)
    gpu.install(monkeypatch)
    assert within_limits(*ZOO[name](), gpu)


@pytest.mark.parametrize("eagerness", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(42))
def test_a_random_plan_keeps_the_limit_on_late_streams(
    seed: int, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(eagerness)
    gpu.install(monkeypatch)
    assert within_limits(*random_offloading(seed), gpu)


@pytest.mark.parametrize("seed", NEED_EARLIER_OFFLOADS)
def test_lanes_that_free_only_what_is_waited_for_are_noticed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    monkeypatch.setattr(CudaLanes, "passed", lambda self, event: event.release())
    assert not within_limits(*random_offloading(seed), gpu)
