"""One device of a rehearsal: the body of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megatron_optpipe.core import Op, Plan, Problem, Program, lower
from megatron_optpipe.runtime.abort import StoreAbort
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.host_pool import HostPool
from megatron_optpipe.runtime.recorder import Recorder
from megatron_optpipe.runtime.rehearse.actors import HopTransport, SleepingHandlers
from megatron_optpipe.runtime.rehearse.clock import now_s, sleep_until
from megatron_optpipe.runtime.rehearse.rendezvous import transport_class
from megatron_optpipe.runtime.store import ActivationStore
from megatron_optpipe.runtime.stores import JOIN_S, connect, under
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from megatron_optpipe.runtime.turns import StoreTurns, awaited_elsewhere

HEAD_START_S = 0.03
"""From the agreement on a start to the start: all processes are awake by then."""


@dataclass(frozen=True, slots=True)
class Task:
    """What every process of a rehearsal is given."""

    problem: Problem
    plan: Plan
    scale: float
    byte_scale: float
    iterations: int
    rendezvous: bool
    port: int
    fail_at: Op | None = None
    slow_copy_s: float = 0.0
    """A sleep before each copy."""


@dataclass(slots=True)
class Result:
    """What one process found; bytes are as they were, scaled down."""

    device: int
    spans_ms: list[tuple[float, float]] = field(default_factory=list)
    overhead_us: list[float] = field(default_factory=list)
    """CPU time of the executor per compute op, one figure an iteration."""
    overhead_wall_us: list[float] = field(default_factory=list)
    """The same in wall time."""
    messages_us: list[float] = field(default_factory=list)
    """CPU time of gloo's calls that start sends and receives, per compute op."""
    peak_bytes: list[int] = field(default_factory=list)
    moved_bytes: int = 0
    freed_bytes: int = 0
    host_reserved_bytes: list[int] = field(default_factory=list)
    measurement: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def run_device(device: int, task: Task, results: Connection) -> None:
    """Run all iterations of one device and send a ``Result``, with ``fault`` if one came."""
    torch.set_num_threads(1)
    # Ranks of one machine: whatever its name resolves to, loopback is there.
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    result = Result(device)
    failed = True
    try:
        _run(device, task, result)
        failed = False
    except Exception as failure:
        result.fault = str(failure) or type(failure).__name__
    results.send(result)
    results.close()
    # Threads may still sit in a broken connection; there is nothing left to wait for.
    os._exit(1 if failed else 0)


def _run(device: int, task: Task, result: Result) -> None:
    problem = task.problem

    def connection() -> Store:
        return connect(task.port)

    store = connection()
    dist.init_process_group(
        "gloo",
        store=under("gloo", store),
        rank=device,
        world_size=problem.num_devices,
        timeout=timedelta(seconds=JOIN_S),
    )
    programs = lower(problem, task.plan)
    abort = StoreAbort(under("abort", connection()), device)
    transport = transport_class(task.rendezvous)(problem, task.scale, device)
    transport.warm_up(programs)
    abort.on_fault(transport.interrupt)
    try:
        _iterate(device, task, result, programs, transport, abort, connection, store)
    finally:
        abort.close()


def _iterate(
    device: int,
    task: Task,
    result: Result,
    programs: Sequence[Program],
    transport: HopTransport,
    abort: StoreAbort,
    connection: Callable[[], Store],
    store: Store,
) -> None:
    problem, scale = task.problem, task.scale
    recorder = Recorder(device, now_s)
    activations = ActivationStore(pool=HostPool(), min_bytes=1)
    lanes = ThreadLanes(
        device,
        abort=abort,
        recorder=recorder,
        turns=StoreTurns(
            lambda: under("turns", connection()),
            awaited_elsewhere(programs, device),
            abort,
        ),
        before_copy=(lambda _: sleep_until(now_s() + task.slow_copy_s)),
        after_copy=(lambda op, began: sleep_until(began + problem.duration_ms(op) * scale * 1e-3)),
    )
    handlers = SleepingHandlers(
        problem, activations, scale=scale, byte_scale=task.byte_scale, fail_at=task.fail_at
    )
    executor = Executor(programs[device], handlers, transport, lanes, activations, recorder, abort)
    num_compute = len(task.plan.devices[device].compute)
    for iteration in range(task.iterations):
        activations.start()
        zero = _common_start(store, iteration, device, problem.num_devices)
        recorder.start(zero)
        sleep_until(zero)
        executor.run()
        result.spans_ms.append(recorder.span_ms)
        result.overhead_us.append(executor.times.overhead_cpu_s * 1e6 / num_compute)
        result.overhead_wall_us.append(executor.times.overhead_s * 1e6 / num_compute)
        result.messages_us.append(executor.times.messages_cpu_s * 1e6 / num_compute)
        result.peak_bytes.append(activations.peak_bytes)
        result.host_reserved_bytes.append(activations.pool.reserved_bytes)
    result.moved_bytes = activations.moved_bytes
    result.freed_bytes = activations.freed_bytes
    recorder.peak_bytes = activations.peak_bytes
    recorder.moved_bytes = activations.moved_bytes
    result.measurement = recorder.to_dict()
    lanes.close()


def _common_start(store: Store, iteration: int, device: int, num_devices: int) -> float:
    """Wait for all devices, then agree on one moment of the common clock."""
    arrived = store.add(f"arrived/{iteration}", 1)
    if arrived == num_devices:
        store.set(f"start/{iteration}", repr(now_s() + HEAD_START_S))
    return float(store.get(f"start/{iteration}"))
