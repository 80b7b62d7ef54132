"""The CUDA lanes on streams that are as late as they may be: no GPU, but every order."""

from __future__ import annotations

import pytest
import torch

from megatron_optpipe.core import Op, lower
from megatron_optpipe.runtime.cuda_lanes import CudaLane, CudaLanes, CudaMark
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.host_need import host_buffers
from megatron_optpipe.runtime.host_pool import HostPool
from megatron_optpipe.runtime.lanes import Job
from megatron_optpipe.runtime.store import ActivationStore, Reload
from megatron_optpipe.runtime.turns import takes_turns
from tests.runtime.fake_cuda import Gpu, Stream, StreamCodec
from tests.runtime.local import LocalTransport, LocalTurns, Net, run_threads
from tests.runtime.toy import ToyHandlers, make_inputs, make_stages, reference
from tests.zoo import ZOO

OFFLOADING = sorted(name for name in ZOO if name.startswith("offload"))


def run(
    name: str, gpu: Gpu, iterations: int = 2, pools: list[HostPool] | None = None
) -> list[BaseException]:
    """Iterations of a plan on faked streams; asserts the gradients if nothing was raised.

    ``pools`` gets the host pool of each device.
    """
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
        if pools is not None:
            pools.append(store.pool)
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
        assert not any(gpu.pending_host_reads.values())
    return failures


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", OFFLOADING)
def test_gradients_on_late_streams(
    name: str, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(eagerness)
    gpu.install(monkeypatch)
    assert run(name, gpu) == []


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", OFFLOADING)
def test_no_more_host_buffers_than_the_plan_needs(
    name: str, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(eagerness)
    gpu.install(monkeypatch)
    pools: list[HostPool] = []
    assert run(name, gpu, iterations=3, pools=pools) == []
    need = [sum(host_buffers(program).values()) for program in lower(*ZOO[name]())]
    assert all(pool.num_buffers <= most for pool, most in zip(pools, need, strict=True))


def test_buffers_that_go_back_only_with_the_memory_of_a_reload_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail: the compute waits for a reload long after the next offload."""
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    monkeypatch.setattr(Reload, "issued", lambda self, ended: None)
    for name, fewest in (("offload-all-one-bus", 1), ("offload-all-half-duplex", 3)):
        pools: list[HostPool] = []
        assert run(name, gpu, pools=pools) == []
        assert all(pool.num_buffers > fewest for pool in pools)


def two_offloads_through_one_buffer(gpu: Gpu) -> None:
    """O, R, and an O of another microbatch that only the host buffer puts behind R."""
    gpu.current.stream = Stream(gpu, immediate=True)
    lanes, store = CudaLanes(), ActivationStore(codec=StreamCodec(gpu), min_bytes=1)
    saved = []
    for j in range(2):
        x = torch.full((64,), float(j + 1), requires_grad=True)
        with store.saving(Op("F", 0, j)):
            saved.append((x, (x * 1.0).square().sum()))  # keeps a storage that is not x
    first = lanes.offload.submit(Job(Op("O", 0, 0), store.offload(Op("O", 0, 0))))
    back = lanes.reload.submit(Job(Op("R", 0, 0), store.reload(Op("R", 0, 0)), (first,)))
    second = lanes.offload.submit(Job(Op("O", 0, 1), store.offload(Op("O", 0, 1))))
    assert store.pool.num_buffers == 1
    assert gpu.overwrites, "the reload had ended: nothing was tested"
    second.event.synchronize()  # the second copy into the buffer first, if nothing holds it back
    back.wait()
    again = lanes.reload.submit(Job(Op("R", 0, 1), store.reload(Op("R", 0, 1)), (second,)))
    again.wait()
    for j, (x, y) in enumerate(saved):
        with store.using(Op("B", 0, j)):
            y.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((64,), 2.0 * (j + 1)))
    lanes.close()


def test_a_buffer_that_is_still_read_is_written_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    two_offloads_through_one_buffer(gpu)


def test_a_buffer_that_forgets_its_last_reader_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(0.0)
    gpu.install(monkeypatch)
    give = HostPool.give
    monkeypatch.setattr(HostPool, "give", lambda pool, buffer, ended=None: give(pool, buffer))
    with pytest.raises(AssertionError, match="written before it was read"):
        two_offloads_through_one_buffer(gpu)


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
