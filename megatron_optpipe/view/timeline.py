"""Timeline: what the pictures draw, made from a plan or from measured files.

One form for both, so that a plan and its measurement can be drawn on one axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_optpipe.core.op import TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import Plan, TimedOp
from megatron_optpipe.core.problem import Problem

__all__ = ["LANES", "Bar", "Step", "Timeline", "memory_steps", "of_plan"]

LANES = ("compute", "d2h", "h2d")


@dataclass(frozen=True, slots=True)
class Bar:
    """One op on one lane of one device, from start to end (ms since the iteration began)."""

    device: int
    lane: str
    op: Op
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """From ``time_ms`` on the device holds ``resident_bytes`` of activations."""

    time_ms: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """An iteration as it was planned or as it happened."""

    label: str
    bars: tuple[Bar, ...]
    memory: tuple[tuple[Step, ...], ...]
    """One tuple of steps a device, by time."""
    measured_peaks_bytes: tuple[int | None, ...] = ()
    """What each device really held at most, where that was measured."""

    @property
    def num_devices(self) -> int:
        """How many devices the timeline has rows for."""
        return len(self.memory)

    @property
    def makespan_ms(self) -> float:
        """The latest end of a compute op."""
        return max((bar.end_ms for bar in self.bars if bar.lane == "compute"), default=0.0)

    @property
    def end_ms(self) -> float:
        """The latest end of anything."""
        return max((bar.end_ms for bar in self.bars), default=0.0)

    @property
    def bubble(self) -> float:
        """Mean over devices of 1 - busy compute time / makespan (0 for an empty timeline)."""
        total_ms = self.makespan_ms * self.num_devices
        busy_ms = sum(bar.end_ms - bar.start_ms for bar in self.bars if bar.lane == "compute")
        return 1.0 - busy_ms / total_ms if total_ms > 0 else 0.0

    def peak_bytes(self, device: int) -> int:
        """The most the device holds at any time; the measured value where there is one."""
        measured = self.measured_peaks_bytes[device] if self.measured_peaks_bytes else None
        if measured is not None:
            return measured
        return max((step.resident_bytes for step in self.memory[device]), default=0)

    def lane(self, device: int, lane: str) -> tuple[Bar, ...]:
        """The bars of one lane of one device, by start."""
        found = [bar for bar in self.bars if bar.device == device and bar.lane == lane]
        return tuple(sorted(found, key=lambda bar: (bar.start_ms, bar.end_ms)))


def of_plan(problem: Problem, plan: Plan, label: str = "planned") -> Timeline:
    """The timeline of a plan; the plan must be for this problem."""
    bars: list[Bar] = []
    for device, devices_plan in enumerate(plan.devices):
        lanes: tuple[Iterable[TimedOp], ...] = (
            devices_plan.compute,
            devices_plan.offload,
            devices_plan.reload,
        )
        for lane, timed_ops in zip(LANES, lanes, strict=True):
            for op, start_ms in timed_ops:
                end_ms = start_ms + problem.duration_ms(op)
                bars.append(Bar(device, lane, op, start_ms, end_ms))
    memory = tuple(memory_steps(problem, bars, device) for device in range(problem.num_devices))
    return Timeline(label, tuple(bars), memory)


def memory_steps(problem: Problem, bars: Iterable[Bar], device: int) -> tuple[Step, ...]:
    """What the device's bars make of its activation memory (rule 7), as steps.

    At one and the same time, within the contract's tolerance, releases come first.
    """
    changes: list[tuple[float, float, int]] = []
    for bar in bars:
        if bar.device != device:
            continue
        change = problem.memory_change(bar.op)
        if change.at_start_bytes:
            changes.append((bar.start_ms, bar.start_ms, change.at_start_bytes))
        if change.at_end_bytes:
            changes.append((bar.end_ms - TIME_TOLERANCE_MS, bar.end_ms, change.at_end_bytes))
    steps = [Step(0.0, 0)]
    for _, time_ms, amount_bytes in sorted(changes):
        at_ms = max(time_ms, steps[-1].time_ms)  # never back, not even by a rounding error
        steps.append(Step(at_ms, steps[-1].resident_bytes + amount_bytes))
    return tuple(steps)
