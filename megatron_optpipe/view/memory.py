"""Activation memory over time, one small plot a device, with the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_optpipe.core.op import TIME_TOLERANCE_MS
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.units import format_bytes
from megatron_optpipe.view.style import FAINT, INK, LIMIT
from megatron_optpipe.view.timeline import Step, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AREA = "#c9d6e6"
LINES = ("#3b5f86", "#222222")
FILLED_PART = 0.80
"""Part of a row's height that the largest value takes."""
NEAR_PART = 0.3
"""A limit is drawn where the peak reaches this part of it; far above, it would flatten all."""


def draw_memory(axes: Axes, problem: Problem, timelines: Sequence[Timeline], row_in: float) -> None:
    """Fill the axes, whose y unit is the inch downwards, with a row of ``row_in`` a device."""
    limits = [device.memory_bytes for device in problem.devices]
    peaks = [
        [timeline.peak_bytes(device) for timeline in timelines]
        for device in range(problem.num_devices)
    ]
    in_sight = [
        0 < NEAR_PART * limit <= max(of_device)
        for limit, of_device in zip(limits, peaks, strict=True)
    ]
    # One scale for all devices, so that they can be compared.
    largest_bytes = max(1, *(peak for of_device in peaks for peak in of_device))
    for limit, visible in zip(limits, in_sight, strict=True):
        largest_bytes = max(largest_bytes, limit if visible else 0)
    per_byte_in = FILLED_PART * row_in / largest_bytes

    for device in range(problem.num_devices):
        floor_in = (device + 1) * row_in - 0.04
        for index, timeline in enumerate(timelines):
            steps = _lasting(timeline.memory[device])
            times_ms = [step.time_ms for step in steps]
            heights = [floor_in - step.resident_bytes * per_byte_in for step in steps]
            times_ms.append(max(timeline.makespan_ms, times_ms[-1]))
            heights.append(heights[-1])
            if index == 0:
                axes.fill_between(
                    times_ms, floor_in, heights, step="post", facecolor=AREA, linewidth=0
                )
            axes.step(times_ms, heights, where="post", color=LINES[index], linewidth=0.8)
        if in_sight[device]:
            axes.axhline(
                floor_in - limits[device] * per_byte_in,
                color=LIMIT,
                linewidth=0.9,
                linestyle=(0, (4, 2)),
            )
        axes.axhline(floor_in, color=FAINT, linewidth=0.4)
        _label(axes, device, floor_in, row_in, peaks[device], limits[device])
    shown = "filled: planned"
    if len(timelines) > 1:
        shown += "; black line: the same bytes at the measured times"
    axes.set_title(
        f"activation memory ({shown}; dashed red: limit)", fontsize=8.5, color=INK, loc="left"
    )


def _lasting(steps: Sequence[Step]) -> list[Step]:
    """Without the steps that another one follows at the same time."""
    pairs = zip(steps, [*steps[1:], None], strict=True)
    return [
        step
        for step, after in pairs
        if after is None or after.time_ms - step.time_ms > 2 * TIME_TOLERANCE_MS
    ]


def _label(
    axes: Axes,
    device: int,
    floor_in: float,
    row_in: float,
    peaks_bytes: Sequence[int],
    limit_bytes: int,
) -> None:
    middle_in = floor_in - row_in * FILLED_PART / 2
    axes.annotate(
        f"device {device}",
        (0.0, middle_in),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8,
        color=INK,
    )
    names = ("peak",) if len(peaks_bytes) == 1 else ("planned", "measured")
    lines = [f"{n} {format_bytes(peak)}" for n, peak in zip(names, peaks_bytes, strict=True)]
    lines.append(f"limit {format_bytes(limit_bytes)}")
    over = any(peak > limit_bytes for peak in peaks_bytes)
    axes.annotate(
        "\n".join(lines),
        (1.0, middle_in),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        fontsize=7 if len(lines) == 2 else 6.5,
        color=LIMIT if over else INK,
        annotation_clip=False,
    )
