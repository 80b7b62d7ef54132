"""Gantt picture of a plan, or of a plan above its measurement, with memory over time.

Needs matplotlib (the extra ``view``), which is imported when a picture is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.units import format_ms
from megatron_optpipe.view.labels import POINTS_PER_INCH, Labels
from megatron_optpipe.view.layout import Rows, plot_width_in, rows_for
from megatron_optpipe.view.memory import draw_memory
from megatron_optpipe.view.style import COLOURS, FAINT, IDLE, INK, NAMES, shade
from megatron_optpipe.view.text import one_line
from megatron_optpipe.view.timeline import LANES, Bar, Timeline, of_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_gantt", "save_gantt"]

LEFT_IN, RIGHT_IN = 1.15, 1.55
MAX_NAME = 80
"""Characters of a problem's name in the title."""


def save_gantt(problem: Problem, plan: Plan, path: Path, measured: Timeline | None = None) -> None:
    """Draw the plan (above the measurement, if there is one) into a PNG, SVG or PDF file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib

    figure = draw_gantt(problem, plan, measured)
    # The same plan gives the same file: no date, no random ids; text stays text in an SVG.
    settings: dict[Any, Any] = {"svg.hashsalt": "optpipe", "svg.fonttype": "none"}
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=130, metadata=metadata)


def draw_gantt(problem: Problem, plan: Plan, measured: Timeline | None = None) -> Figure:
    """The figure itself. Devices are rows, time runs to the right, memory is drawn below."""
    from matplotlib.figure import Figure

    timelines = [of_plan(problem, plan)] + ([measured] if measured is not None else [])
    rows = rows_for(problem, timelines)
    memory_row_in = 0.5 if problem.num_devices <= 8 else 0.36 if measured is None else 0.42
    width_in = plot_width_in(timelines)
    # A wide picture is looked at from afar: its head grows with it.
    head = min(max(width_in / 16.0, 1.0), 2.0)
    gantt_in = problem.num_devices * rows.device_in
    memory_in = problem.num_devices * memory_row_in
    top_in, between_in, bottom_in = 0.95 * head, 0.62, 0.5
    height_in = top_in + gantt_in + between_in + memory_in + bottom_in
    figure_in = LEFT_IN + width_in + RIGHT_IN

    figure = Figure(figsize=(figure_in, height_in), facecolor="white")

    def axes_at(from_bottom_in: float, tall_in: float) -> Axes:
        axes: Axes = figure.add_axes(
            (
                LEFT_IN / figure_in,
                from_bottom_in / height_in,
                width_in / figure_in,
                tall_in / height_in,
            )
        )
        axes.set_xlim(0.0, max(timeline.end_ms for timeline in timelines) * 1.004)
        axes.set_ylim(tall_in, 0.0)
        axes.set_yticks([])
        axes.tick_params(axis="x", labelsize=8, colors=INK, length=3)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        return axes

    memory_axes = axes_at(bottom_in, memory_in)
    gantt_axes = axes_at(bottom_in + memory_in + between_in, gantt_in)
    _draw_rows(gantt_axes, problem, timelines, rows, width_in)
    draw_memory(memory_axes, problem, timelines, memory_row_in)
    memory_axes.set_xlabel("ms since the iteration began", fontsize=9, color=INK)
    place = _Head(figure, LEFT_IN / figure_in, height_in, head)
    _write_title(place, problem, plan, timelines)
    _draw_legend(place, timelines)
    return figure


def _draw_rows(
    axes: Axes, problem: Problem, timelines: Sequence[Timeline], rows: Rows, width_in: float
) -> None:
    labels = Labels(points_per_ms=width_in * POINTS_PER_INCH / axes.get_xlim()[1])
    for index, timeline in enumerate(timelines):
        for device in range(problem.num_devices):
            top_in = rows.top_in(device, index, "compute")
            idle = (0.0, timeline.makespan_ms)
            axes.broken_barh([idle], (top_in, rows.compute_in), facecolor=IDLE, linewidth=0)
            for lane in LANES:
                bars = timeline.lane(device, lane)
                lane_top_in = rows.top_in(device, index, lane)
                _draw_bars(axes, problem, bars, lane_top_in, rows.height_in(lane), labels)
            if len(timelines) > 1:
                _row_name(axes, timeline.label, top_in + rows.compute_in / 2, 4, 6.5, FAINT)
        style = "-" if index == 0 else ":"
        axes.axvline(timeline.makespan_ms, color=INK, linewidth=0.8, linestyle=style)
    labels.draw(axes)
    left_points = 8.0 if len(timelines) == 1 else 42.0
    for device in range(problem.num_devices):
        middle_in = device * rows.device_in + (rows.device_in - rows.device_gap_in) / 2
        _row_name(axes, f"device {device}", middle_in, left_points, 8.5, INK)


def _row_name(
    axes: Axes, text: str, y_in: float, left_points: float, font_size: float, colour: str
) -> None:
    axes.annotate(
        text,
        (0.0, y_in),
        xytext=(-left_points, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=font_size,
        color=colour,
    )


def _draw_bars(
    axes: Axes,
    problem: Problem,
    bars: Sequence[Bar],
    top_in: float,
    height_in: float,
    labels: Labels,
) -> None:
    """Draw one lane, one collection a colour, and ask for the microbatch numbers."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for bar in bars:
        chunks = problem.stages_on(bar.device)
        chunk = chunks.index(bar.op.stage)
        colour = shade(COLOURS[bar.op.kind], chunk, len(chunks))
        groups.setdefault(colour, []).append((bar.start_ms, bar.end_ms - bar.start_ms))
        ink = "white" if chunk == 0 or chunk * 2 < len(chunks) else INK
        labels.add(str(bar.op.microbatch), bar.start_ms, bar.end_ms, top_in, height_in, ink)
    for colour, spans in groups.items():
        axes.broken_barh(
            spans, (top_in, height_in), facecolor=colour, edgecolor="white", linewidth=0.35
        )


@dataclass(frozen=True, slots=True)
class _Head:
    """Where title and legend go, and how much larger than usual they are."""

    figure: Figure
    left: float
    height_in: float
    scale: float

    def y(self, down_in: float) -> float:
        """The figure coordinate of a distance from the top."""
        return 1.0 - down_in * self.scale / self.height_in


def _write_title(head: _Head, problem: Problem, plan: Plan, timelines: Sequence[Timeline]) -> None:
    shape = f"{problem.num_devices} devices x {problem.num_microbatches} microbatches"
    if problem.num_stages != problem.num_devices:
        shape += f", {problem.num_stages} stages"
    name = one_line(problem.name or "", MAX_NAME)
    title = f"{name}  ({shape})" if name else shape
    parts = [one_line(plan.method, MAX_NAME)]
    for timeline in timelines:
        parts.append(
            f"{timeline.label}: makespan {format_ms(timeline.makespan_ms)},"
            f" bubble {timeline.bubble:.1%}"
        )
    if len(timelines) > 1 and timelines[0].makespan_ms > 0:
        ratio = timelines[1].makespan_ms / timelines[0].makespan_ms
        parts.append(f"measured / planned {ratio:.3f}")
    if plan.lower_bound_ms:
        parts.append(f"proven lower bound {format_ms(plan.lower_bound_ms)}")
    first, second = title, "   |   ".join(parts)
    # Names come from a file: a dollar sign in them is no formula.
    common: dict[str, Any] = {"color": INK, "parse_math": False}
    text, scale = head.figure.text, head.scale
    text(head.left, head.y(0.28), first, fontsize=12.5 * scale, weight="bold", **common)
    text(head.left, head.y(0.52), second, fontsize=9.5 * scale, **common)


def _draw_legend(head: _Head, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {bar.op.kind for timeline in timelines for bar in timeline.bars}
    handles = [
        Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in "FBWOR" if kind in used
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    head.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(head.left, head.y(0.6)),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5 * head.scale,
        handlelength=1.2,
        columnspacing=1.6,
        borderaxespad=0.0,
        borderpad=0.2,
        labelcolor=INK,
    )
