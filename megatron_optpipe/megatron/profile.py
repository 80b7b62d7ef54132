"""Measures a job for ``--optpipe-write-problem``: times, bytes, messages and links, all ranks.

The first iterations run under a classic order with B and W apart. Ops are timed where they run;
bytes are read from the activation store (each storage once, while it is alive), so that the planner
counts what the runtime counts. Links are measured on all ranks at once, since they may share a
switch.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Device, Link, Problem, Stage, save_problem
from megatron_optpipe.megatron.engine import Engine, Rank
from megatron_optpipe.runtime.group_transport import MessageSpec
from megatron_optpipe.runtime.store import ActivationStore

__all__ = ["MeasuringStore", "Profile"]

ROUNDS = 5
"""Repetitions of each message and copy that is timed; the median counts."""

COPY_BYTES = 32 * 2**20
"""Least size of a copy that measures a link: smaller ones show its latency."""

UNIFORM = 1.25
"""Message times within this factor of each other are written as one number."""


@dataclass(slots=True)
class StageBytes:
    """What one microbatch of a stage does to device memory, the worst of those seen."""

    activation: int = 0
    frees: int | None = None
    freed_by_offload: int = 0
    wire: int = 0


class MeasuringStore(ActivationStore):
    """An activation store that also notes, for each stage, what F takes and B gives back.

    For one plan without offloads: deltas of what is resident are read around each op. The first
    F of each stage is followed by one offload and reload, to see how much really leaves.
    """

    stage_bytes: dict[int, StageBytes]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage_bytes = defaultdict(StageBytes)

    @contextmanager
    def saving(self, op: Op) -> Iterator[None]:
        """Around F: what it leaves resident."""
        before = self.resident_bytes
        with super().saving(op):
            yield
        seen = self.stage_bytes[op.stage]
        if not seen.activation:
            self._try_offload(op, seen)
        seen.activation = max(seen.activation, self.resident_bytes - before)

    @contextmanager
    def using(self, op: Op) -> Iterator[None]:
        """Around B: what it gives back (negative where W needs more than F left)."""
        before = self.resident_bytes
        with super().using(op):
            yield
        seen = self.stage_bytes[op.stage]
        frees = before - self.resident_bytes
        seen.frees = frees if seen.frees is None else min(seen.frees, frees)

    def _try_offload(self, op: Op, seen: StageBytes) -> None:
        """There and back on the compute lane, each step waited for."""
        moved, freed = self.moved_bytes, self.freed_bytes
        done = _Done()
        for transfer in (self.offload(op), self.reload(op)):
            transfer.allocate()
            transfer.copy()
            _synchronize(self.device)
            transfer.release(done)
        seen.wire = self.moved_bytes - moved
        seen.freed_by_offload = self.freed_bytes - freed


@dataclass(slots=True)
class _Done:
    """An event that has passed."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


@dataclass(slots=True)
class Profile:
    """Collects ``num_iterations`` iterations after one to warm up, then writes the problem."""

    problem: Problem
    """The shape; its times and bytes are replaced by measured ones."""
    rank: Rank
    path: Path
    limit_bytes: int | None
    num_iterations: int
    _seen: int = 0
    _times_ms: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    _peak_bytes: int = 0

    def add(self, engine: Engine, spec: MessageSpec) -> bool:
        """Take in an iteration that has just ended; ``True`` once the problem is written.

        Collective: all ranks measure and write together after the last one.
        """
        self._seen += 1
        self._peak_bytes = max(self._peak_bytes, engine.store.peak_bytes)
        if self._seen == 1:
            return False
        engine.read_times()
        for op, (began_ms, ended_ms) in engine.recorder.times_ms.items():
            self._times_ms[op.kind, op.stage].append(ended_ms - began_ms)
        if self._seen <= self.num_iterations:
            return False
        self._write(engine, spec)
        return True

    def _write(self, engine: Engine, spec: MessageSpec) -> None:
        assert isinstance(engine.store, MeasuringStore)
        world = torch.distributed
        stage_bytes = engine.store.stage_bytes
        d2h_gbps, h2d_gbps = _link_speeds(self.rank, max(b.wire for b in stage_bytes.values()))
        mine = {
            "device": engine.device,
            "times_ms": {key: statistics.median(ms) for key, ms in self._times_ms.items()},
            "bytes": {
                stage: (b.activation, b.frees, b.freed_by_offload, b.wire)
                for stage, b in stage_bytes.items()
            },
            "d2h_gbps": d2h_gbps,
            "h2d_gbps": h2d_gbps,
            "hops_ms": _hops(self.problem, self.rank, spec),
            "memory_bytes": self.limit_bytes or _free_bytes(self.rank, self._peak_bytes),
        }
        everyone: list[Any] = [None] * world.get_world_size()
        world.all_gather_object(everyone, mine)
        if world.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_problem(merge(self.problem, everyone, self._seen - 1), self.path)
            print(f"optpipe: measured {self._seen - 1} iterations, wrote {self.path}", flush=True)
        world.barrier()


def merge(shape: Problem, everyone: list[dict[str, Any]], iterations: int) -> Problem:
    """One problem from what every rank measured (several ranks a device with data parallelism).

    Times are medians over the ranks of a device; bytes and link speeds the worst of them.
    """
    of_device: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for measured in everyone:
        of_device[measured["device"]].append(measured)
    stages = []
    for stage in range(shape.num_stages):
        ranks = of_device[shape.device_of(stage)]
        ms = {kind: statistics.median(r["times_ms"][kind, stage] for r in ranks) for kind in "FBW"}
        seen = [r["bytes"][stage] for r in ranks]
        activation = max(b[0] for b in seen)
        stages.append(
            Stage(
                forward_ms=_round(ms["F"]),
                backward_input_ms=_round(ms["B"]),
                backward_weight_ms=_round(ms["W"]),
                activation_bytes=activation,
                backward_frees_bytes=min(activation, min(b[1] for b in seen)),
                offload_bytes=min(b[2] for b in seen),
                offload_wire_bytes=max(b[3] for b in seen),
            )
        )
    devices, links = [], {}
    for device in range(shape.num_devices):
        ranks = of_device[device]
        links[f"d2h{device}"] = Link(_round(min(r["d2h_gbps"] for r in ranks)))
        links[f"h2d{device}"] = Link(_round(min(r["h2d_gbps"] for r in ranks)))
        limit = min(r["memory_bytes"] for r in ranks)
        devices.append(Device(limit, f"d2h{device}", f"h2d{device}"))
    return Problem(
        num_microbatches=shape.num_microbatches,
        stage_device=shape.stage_device,
        stages=tuple(stages),
        devices=tuple(devices),
        links=links,
        p2p_ms=_hop_matrix(shape, everyone),
        name="measured",
        notes=f"medians over {iterations} iterations, all microbatches and {len(everyone)} ranks",
    )


def _hop_matrix(
    shape: Problem, everyone: list[dict[str, Any]]
) -> float | tuple[tuple[float, ...], ...]:
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for measured in everyone:
        for pair, ms in measured["hops_ms"].items():
            seen[pair].append(ms)
    hops = {pair: statistics.median(values) for pair, values in seen.items()}
    if not hops:
        return 0.0
    if max(hops.values()) <= UNIFORM * min(hops.values()):
        return _round(statistics.median(hops.values()))
    unknown = max(hops.values())
    return tuple(
        tuple(
            0.0 if src == dst else _round(hops.get((min(src, dst), max(src, dst)), unknown))
            for dst in range(shape.num_devices)
        )
        for src in range(shape.num_devices)
    )


def _hops(problem: Problem, rank: Rank, spec: MessageSpec) -> dict[tuple[int, int], float]:
    """One-way message times of the pairs that neighbouring stages make, in one order."""
    world, group, mine = torch.distributed, rank.pp_group, rank.pp_group.rank()
    ranks = world.get_process_group_ranks(group)
    placement = problem.stage_device
    pairs = {(min(a, b), max(a, b)) for a, b in zip(placement, placement[1:]) if a != b}
    message = torch.zeros(spec.shape, dtype=spec.dtype, device=rank.torch_device)
    found: dict[tuple[int, int], float] = {}
    for low, high in sorted(pairs):
        if mine not in (low, high):
            continue
        first, second = (world.send, world.recv) if mine == low else (world.recv, world.send)
        peer = ranks[high if mine == low else low]

        def there_and_back() -> None:
            first(message, peer, group)  # noqa: B023
            second(message, peer, group)  # noqa: B023

        there_and_back()
        found[low, high] = _median_s(there_and_back, rank.torch_device) * 1e3 / 2
    return found


def _link_speeds(rank: Rank, num_bytes: int) -> tuple[float, float]:
    """GB/s from device to host and back, all ranks copying at the same time."""
    size = max(num_bytes, COPY_BYTES)
    on_device = torch.zeros(size, dtype=torch.uint8, device=rank.torch_device)
    pinned = rank.torch_device.type == "cuda"
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    speeds = []
    for target, source in ((on_host, on_device), (on_device, on_host)):
        torch.distributed.barrier()
        seconds = _median_s(partial(target.copy_, source), rank.torch_device)
        speeds.append(size / seconds / 1e9)
    return speeds[0], speeds[1]


def _median_s(call: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS):
        _synchronize(device)
        began = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return max(statistics.median(times), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_bytes(rank: Rank, peak_bytes: int) -> int:
    """What activations may use: what is free now, between iterations, with a margin of 5 %.

    On a CPU there is no such number, and the peak of the measured run stands for it.
    """
    if rank.torch_device.type != "cuda":
        return peak_bytes
    free, _ = torch.cuda.mem_get_info(rank.torch_device)
    unused = torch.cuda.memory_reserved(rank.torch_device) - torch.cuda.memory_allocated(
        rank.torch_device
    )
    return int(0.95 * (free + unused))


def _round(value: float) -> float:
    """Six significant digits: a measurement has no more, and files stay readable."""
    return float(f"{max(value, 1e-6):.6g}")
