"""The comparison of methods as a table for people and as CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import IO

from megatron_optpipe.compare import MethodResult
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.units import format_bytes
from megatron_optpipe.view.text import one_line

__all__ = ["CSV_COLUMNS", "comparison_csv", "print_comparison"]

CSV_COLUMNS = (
    "method",
    "feasible",
    "makespan_ms",
    "bubble",
    "own_span_ms",
    "peak_bytes",
    "moved_bytes",
    "lower_bound_ms",
    "planning_s",
    "verdict",
)
MIN_WIDTH = 100
"""Columns assumed where the output is not a terminal."""


def comparison_csv(rows: Sequence[MethodResult]) -> str:
    """A header and a line a method; peaks of the devices are separated by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        fixed = [row.method, "yes" if row.feasible else "no"]
        figures: list[object] = [""] * 6
        if row.summary is not None:
            bound_ms = row.plan.lower_bound_ms if row.plan is not None else None
            figures = [
                repr(row.summary.makespan_ms),
                f"{row.summary.bubble:.6f}",
                repr(max(row.summary.own_span_ms)),
                " ".join(str(peak) for peak in row.summary.peak_bytes),
                sum(row.summary.moved_bytes),
                "" if bound_ms is None else repr(bound_ms),
            ]
        writer.writerow([*fixed, *figures, f"{row.planning_s:.3f}", row.verdict])
    return text.getvalue()


def print_comparison(problem: Problem, rows: Sequence[MethodResult], out: IO[str]) -> None:
    """Print the table; the quickest feasible plan is marked with a star."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Without a terminal rich assumes 80 columns and cuts; a file has no width.
    console = Console(file=out, width=None if out.isatty() else MIN_WIDTH + 60, highlight=False)
    limits = sorted({device.memory_bytes for device in problem.devices})
    limit = " to ".join(format_bytes(value) for value in dict.fromkeys((limits[0], limits[-1])))
    # A terminal may not know the letters of a name.
    encoding = getattr(out, "encoding", None) or "utf-8"
    name = one_line(problem.name or "problem").encode(encoding, "replace").decode(encoding)
    title = (
        f"{name}: {problem.num_devices} devices,"
        f" {problem.num_microbatches} microbatches, limit {limit} a device"
    )
    console.print(Text(title, style="bold"))
    table = Table(box=box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD)
    unit, size = _unit(rows)
    table.add_column("method", no_wrap=True)
    for heading in ("makespan ms", "bubble", "own span ms", f"peak {unit}", f"moved {unit}"):
        table.add_column(heading, justify="right")
    table.add_column("planned in s", justify="right")
    table.add_column("fits the memory", overflow="fold")
    best = _best(rows)
    for row in rows:
        style = "bold green" if row is best else "" if row.feasible else "dim"
        table.add_row(*(Text(cell) for cell in _cells(row, row is best, size)), style=style)
    if out.isatty():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    out.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _best(rows: Sequence[MethodResult]) -> MethodResult | None:
    fitting = [row for row in rows if row.feasible and row.summary is not None]
    return min(fitting, key=lambda r: r.summary.makespan_ms if r.summary else 0.0, default=None)


def _unit(rows: Sequence[MethodResult]) -> tuple[str, int]:
    """The unit in which the largest peak is a number of one to three digits."""
    peaks = [peak for row in rows if row.summary is not None for peak in row.summary.peak_bytes]
    largest = max(peaks, default=0)
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if largest >= size:
            return unit, size
    return "B", 1


def _cells(row: MethodResult, is_best: bool, size: int) -> tuple[str, ...]:
    name = f"{row.method} *" if is_best else row.method
    planning = f"{row.planning_s:.2f}"
    if row.summary is None:
        return (name, "-", "-", "-", "-", "-", planning, row.verdict)
    return (
        name,
        f"{row.summary.makespan_ms:.2f}",
        f"{row.summary.bubble:.2%}",
        f"{max(row.summary.own_span_ms):.2f}",
        _peaks(row.summary.peak_bytes, size),
        f"{sum(row.summary.moved_bytes) / size:.2f}",
        planning,
        row.verdict,
    )


def _peaks(peaks_bytes: Sequence[int], size: int) -> str:
    """The peak of each device; from nine devices on, the smallest and the largest."""
    if len(peaks_bytes) <= 8:
        return " ".join(f"{peak / size:.2f}" for peak in peaks_bytes)
    return f"{min(peaks_bytes) / size:.2f} .. {max(peaks_bytes) / size:.2f}"
