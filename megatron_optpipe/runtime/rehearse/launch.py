"""Starts the processes of a rehearsal, watches over them and puts the report together."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from megatron_optpipe.core import Op, OptPipeError, Plan, Problem, require_valid, summarize
from megatron_optpipe.runtime.rehearse.pieces import (
    MEMORY_SHARE,
    fitting_byte_scale,
    free_memory_bytes,
)
from megatron_optpipe.runtime.rehearse.report import DeviceReport, RehearsalReport
from megatron_optpipe.runtime.rehearse.worker import Result, Task, run_device
from megatron_optpipe.runtime.stores import JOIN_S, serve

AFTER_FAULT_S = 30.0
"""All processes have ended this long after the first one failed, or are ended."""

SLOWER = 10.0
"""A rehearsal that takes this many times as long as planned is stuck."""


PRELOAD = ["megatron_optpipe.runtime.rehearse.worker"]
"""Imported once, by the server that all processes are forked from."""


class RehearsalFailed(OptPipeError):
    """A process failed or stood still; the message is the first fault.

    ``faults``: what each device that failed said.
    """

    def __init__(self, message: str, faults: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


def rehearse(
    problem: Problem,
    plan: Plan,
    scale: float = 1.0,
    *,
    iterations: int = 3,
    rendezvous: bool = False,
    fail_at: Op | None = None,
    slow_copy_ms: float = 0.0,
) -> RehearsalReport:
    """Run ``plan`` for ``iterations`` iterations, one process a device, times x ``scale``.

    ``rendezvous``: every send blocks until its receive is posted. ``fail_at`` and
    ``slow_copy_ms`` (a sleep before each copy) are for trying out what goes wrong.
    Raises ``PlanInvalid`` for a plan that breaks a rule, ``RehearsalFailed`` naming rank, op and
    position for one that does not end.
    """
    require_valid(problem, plan)
    byte_scale = fitting_byte_scale(problem, plan, scale, int(free_memory_bytes() * MEMORY_SHARE))
    server, port = serve()
    task = Task(
        problem=problem,
        plan=plan,
        scale=scale,
        byte_scale=byte_scale,
        iterations=iterations,
        rendezvous=rendezvous,
        port=port,
        fail_at=fail_at,
        slow_copy_s=slow_copy_ms * 1e-3,
    )
    limit_s = 2 * JOIN_S + SLOWER * iterations * plan.makespan_ms * scale * 1e-3
    results = _run_all(task, limit_s)
    del server  # it serves the processes until here
    return _report(task, results)


def _run_all(task: Task, limit_s: float) -> list[Result]:
    """One result a device. Raises ``RehearsalFailed``."""
    context = multiprocessing.get_context("forkserver")
    # torch is imported once and inherited; no thread of it runs before the processes are forked.
    context.set_forkserver_preload(PRELOAD)
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    results: dict[int, Result] = {}
    try:
        for device in range(task.problem.num_devices):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=run_device, args=(device, task, theirs), name=f"device-{device}", daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = device
        _collect(pipes, results, time.monotonic() + limit_s)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
    missing = [d for d in range(len(processes)) if d not in results]
    faults = {d: r.fault for d, r in results.items() if r.fault is not None}
    if faults:
        raise RehearsalFailed(f"the rehearsal failed: {next(iter(faults.values()))}", faults)
    if missing:
        raise RehearsalFailed(
            f"the rehearsal did not end within {limit_s:.0f} s: devices {missing} were still "
            "running; rehearse with a smaller --scale or look for what keeps this machine busy"
        )
    return [results[d] for d in range(len(processes))]


def _collect(pipes: dict[Connection, int], results: dict[int, Result], deadline_s: float) -> None:
    """Fill ``results`` until all are there, or time is up (sooner once one has failed)."""
    open_pipes = dict(pipes)
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            device = open_pipes.pop(pipe)
            try:
                result = pipe.recv()
            except EOFError:
                result = Result(device, fault=f"the process of device {device} died")
            results[device] = result
            if result.fault is not None:
                deadline_s = min(deadline_s, time.monotonic() + AFTER_FAULT_S)


def _report(task: Task, results: list[Result]) -> RehearsalReport:
    summary = summarize(task.problem, task.plan)
    spans = [
        max(r.spans_ms[i][1] for r in results) - min(r.spans_ms[i][0] for r in results)
        for i in range(task.iterations)
    ]
    best = spans.index(min(spans))
    unscale = 1.0 / task.byte_scale
    devices = tuple(
        DeviceReport(
            device=d,
            overhead_us=result.overhead_us[best],
            overhead_wall_us=result.overhead_wall_us[best],
            messages_us=result.messages_us[best],
            planned_peak_bytes=summary.peak_bytes[d],
            peak_bytes=round(max(result.peak_bytes) * unscale),
            memory_bytes=task.problem.devices[d].memory_bytes,
            planned_moved_bytes=summary.moved_bytes[d],
            moved_bytes=round(result.moved_bytes * unscale),
            freed_bytes=round(result.freed_bytes * unscale),
            measurement=result.measurement,
        )
        for d, result in enumerate(results)
    )
    return RehearsalReport(
        method=task.plan.method,
        scale=task.scale,
        byte_scale=task.byte_scale,
        rendezvous=task.rendezvous,
        planned_ms=task.plan.makespan_ms * task.scale,
        iterations_ms=tuple(spans),
        devices=devices,
    )
