"""The CUDA lanes on streams that are as late as they may be: no GPU, but every order."""

from __future__ import annotations

import pytest
import torch

from megatron_optpipe.core import Op, lower
from megatron_optpipe.runtime.cuda_lanes import CudaLane, CudaLanes, CudaMark
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.lanes import Job
from megatron_optpipe.runtime.store import ActivationStore
from megatron_optpipe.runtime.turns import takes_turns
from tests.runtime.fake_cuda import Gpu, Stream, StreamCodec
from tests.runtime.local import LocalTransport, LocalTurns, Net, run_threads
from tests.runtime.toy import ToyHandlers, make_inputs, make_stages, reference
from tests.zoo import ZOO

OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))


def run(name: str, gpu: Gpu, iterations: int = 2) -> list[BaseException]:
    """Iterations of a plan on faked streams; asserts the gradients if nothing was raised."""
    problem, plan = ZOO[name]()
    programs, net = lower(problem, plan), Net()
    stages, inputs = make_stages(problem.num_stages), make_inputs(problem.num_microbatches)
    executors, every_lane = [], []
    for program in programs:
        gpu.current.stream = Stream(gpu, immediate=True)
        shared = takes_turns(programs, program.device)
        turns = LocalTurns(net) if shared else None
        lanes = CudaLanes(program.device, abort=net.abort, turns=turns)
        store = ActivationStore(codec=StreamCodec(gpu), min_bytes=1)
        handlers = ToyHandlers(problem, stages, inputs, store)
        transport = LocalTransport(net)
        executors.append(Executor(program, handlers, transport, lanes, store, abort=net.abort))
        every_lane.append(lanes)
    failures: list[BaseException] = []
    for _ in range(iterations):
        for stage in stages:
            stage.zero_grad()
        failures = failures or run_threads(executors, net)
    for lanes in every_lane:
        lanes.close()
    if not failures:
        _, grads = reference(problem)
        found = [p.grad for stage in stages for p in stage.parameters()]
        assert all(a is not None and torch.equal(a, b) for a, b in zip(found, grads, strict=True))
        assert not gpu.pending_reads
    return failures


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", OFFLOADING)
def test_gradients_on_late_streams(
    name: str, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(eagerness)
    gpu.install(monkeypatch)
    assert run(name, gpu) == []


def wrong(name: str, gpu: Gpu) -> bool:
    """Whether a broken lane is noticed: by the streams, or in the gradients."""
    try:
        return bool(run(name, gpu))
    except AssertionError:
        return True


def test_a_compute_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    wait_event = Stream.wait_event
    monkeypatch.setattr(
        Stream, "wait_event", lambda s, e: None if s.immediate else wait_event(s, e)
    )
    assert wrong("offload-all-full-duplex", gpu)


def test_a_reload_that_does_not_wait_for_its_offload_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    wait_event = Stream.wait_event
    # Reload streams go first where nothing makes them wait.
    monkeypatch.setattr(
        Stream, "wait_event", lambda s, e: wait_event(s, e) if s.immediate else None
    )
    monkeypatch.setattr(CudaMark, "wait", lambda self: None)
    monkeypatch.setattr(
        "megatron_optpipe.runtime.cuda_lanes.CudaJobEvent.wait", lambda self: self.release()
    )
    assert wrong("offload-all-full-duplex", gpu)


def test_a_shared_link_without_turns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    gpu.current.stream = Stream(gpu, immediate=True)
    lanes = CudaLanes()
    lane: CudaLane = lanes.offload
    store = ActivationStore()
    op, other = Op("O", 0, 0), Op("O", 1, 0)
    with pytest.raises(RuntimeError, match=r"O\(0,0\) shares its link with O\(1,0\)"):
        lane.submit(Job(op, store.offload(op), (), (other,)))
