"""What a rehearsal found, and how it reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device; bytes are in the plan's measure, however far the rehearsal scaled them down."""

    device: int
    overhead_us: float
    """CPU time of the executor itself per compute op, in the best iteration: what the compute
    thread does apart from its handlers and apart from waiting."""
    overhead_wall_us: float
    """The same in wall time: with it, what other processes took meanwhile."""
    messages_us: float
    """CPU time of the calls that start sends and receives (here gloo's, over sockets)."""
    planned_peak_bytes: int
    peak_bytes: int
    """The worst of all iterations."""
    memory_bytes: int
    planned_moved_bytes: int
    moved_bytes: int
    freed_bytes: int
    """What offloads really gave back to the device."""
    measurement: dict[str, Any] = field(repr=False)
    """Times of every op of the last iteration (``optpipe.measurement/1``)."""


@dataclass(frozen=True, slots=True)
class RehearsalReport:
    """Achieved against planned; times include ``scale``."""

    method: str
    scale: float
    byte_scale: float
    rendezvous: bool
    planned_ms: float
    iterations_ms: tuple[float, ...]
    devices: tuple[DeviceReport, ...]

    @property
    def achieved_ms(self) -> float:
        """Makespan of the best iteration: the others had this machine's other work in them."""
        return min(self.iterations_ms)

    @property
    def ratio(self) -> float:
        """Achieved over planned makespan."""
        return self.achieved_ms / self.planned_ms

    @property
    def overhead_us(self) -> float:
        """CPU time of the executor itself per compute op: the mean over devices."""
        return sum(d.overhead_us for d in self.devices) / len(self.devices)

    @property
    def overhead_wall_us(self) -> float:
        """The same in wall time."""
        return sum(d.overhead_wall_us for d in self.devices) / len(self.devices)

    @property
    def messages_us(self) -> float:
        """CPU time to start sends and receives per compute op."""
        return sum(d.messages_us for d in self.devices) / len(self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the derived figures."""
        return {
            **asdict(self),
            "achieved_ms": self.achieved_ms,
            "ratio": self.ratio,
            "overhead_us": self.overhead_us,
            "overhead_wall_us": self.overhead_wall_us,
            "messages_us": self.messages_us,
        }

    def __str__(self) -> str:
        worst = max(d.overhead_us for d in self.devices)
        runs = ", ".join(f"{ms:.1f}" for ms in self.iterations_ms)
        sends = "rendezvous sends" if self.rendezvous else "buffered sends"
        lines = [
            f"plan {self.method!r} on {len(self.devices)} devices, times x {self.scale:g}, "
            f"bytes x {self.byte_scale:.3g}, {sends}: ended",
            f"makespan    planned {self.planned_ms:.1f} ms, achieved {self.achieved_ms:.1f} ms, "
            f"ratio {self.ratio:.3f} (iterations: {runs} ms)",
            f"executor    {self.overhead_us:.0f} us per op (worst device {worst:.0f} us; "
            f"{self.overhead_wall_us:.0f} us of wall time), "
            f"starting messages {self.messages_us:.0f} us",
            "device    peak planned    peak measured            limit    moved planned"
            "   moved measured",
        ]
        lines += [
            f"{d.device:6d} {d.planned_peak_bytes:15d}  {d.peak_bytes:15d}  {d.memory_bytes:15d}"
            f"  {d.planned_moved_bytes:15d}  {d.moved_bytes:15d}"
            for d in self.devices
        ]
        return "\n".join(lines)
