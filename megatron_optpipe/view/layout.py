"""Where the rows of a Gantt picture lie, and how large it becomes. All lengths are inches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_optpipe.core.problem import Problem
from megatron_optpipe.view.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each lane of each device lies. All in inches, downwards from the top of the axes."""

    compute_in: float
    lane_in: float
    timeline_gap_in: float
    device_gap_in: float
    num_timelines: int
    with_lanes: bool

    @property
    def timeline_in(self) -> float:
        """Height of the lanes of one timeline of one device."""
        return self.compute_in + (2 * self.lane_in if self.with_lanes else 0.0)

    @property
    def device_in(self) -> float:
        """Height of one device with the gap below it."""
        inner = self.num_timelines * self.timeline_in
        return inner + (self.num_timelines - 1) * self.timeline_gap_in + self.device_gap_in

    def top_in(self, device: int, timeline: int, lane: str) -> float:
        """Where the lane begins."""
        top = device * self.device_in + timeline * (self.timeline_in + self.timeline_gap_in)
        offset = {
            "compute": 0.0,
            "d2h": self.compute_in,
            "h2d": self.compute_in + self.lane_in,
        }
        return top + offset[lane]

    def height_in(self, lane: str) -> float:
        """Height of the lane's bars."""
        return self.compute_in if lane == "compute" else self.lane_in


def rows_for(problem: Problem, timelines: Sequence[Timeline]) -> Rows:
    """Rows that are thick for few devices and still readable for many."""
    few, some = problem.num_devices <= 8, problem.num_devices <= 16
    with_lanes = any(bar.lane != "compute" for t in timelines for bar in t.bars)
    return Rows(
        compute_in=0.30 if few else 0.24 if some else 0.14,
        lane_in=0.13 if few else 0.10 if some else 0.06,
        timeline_gap_in=0.05,
        device_gap_in=0.16 if few else 0.12 if some else 0.06,
        num_timelines=len(timelines),
        with_lanes=with_lanes,
    )


def plot_width_in(timelines: Sequence[Timeline]) -> float:
    """Wide enough for a number in an average bar, within what a screen and a file can take."""
    first = timelines[0]
    busiest = max(
        (len(first.lane(device, "compute")) for device in range(first.num_devices)), default=1
    )
    stretch = max(t.end_ms for t in timelines) / max(first.makespan_ms, 1e-9)
    wanted_in = 0.17 * busiest / max(1.0 - first.bubble, 0.3) * stretch
    return min(max(wanted_in, 11.0), 44.0)
