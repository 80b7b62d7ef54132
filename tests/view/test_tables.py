"""The comparison: what fits, by how much not, and the same figures in table and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.compare import PLANNING_METHODS, compare_methods
from megatron_optpipe.core import check, load_problem
from megatron_optpipe.planner import METHODS
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from megatron_optpipe.view.tables import CSV_COLUMNS, comparison_csv, print_comparison
from tests.cli_runner import optpipe

VECTORS = Path(__file__).parents[1] / "core" / "vectors"
OFFLOAD = VECTORS / "offload4x8.problem.json"
QUICK = (*CLASSIC_ORDERS, "greedy")


def test_every_method_of_the_planner_is_compared() -> None:
    assert {*CLASSIC_ORDERS, *PLANNING_METHODS} == {*METHODS, "auto"}


def test_feasible_rows_are_valid_and_others_say_by_how_much_not() -> None:
    problem = load_problem(OFFLOAD)
    rows = {row.method: row for row in compare_methods(problem, methods=QUICK)}
    assert rows["greedy"].feasible
    assert rows["greedy"].plan is not None
    assert check(problem, rows["greedy"].plan) == []
    # 1F1B holds four microbatches on the first device, the limit holds three.
    assert rows["1f1b"].verdict == "no: device 0 lacks 1.00 GB"
    assert rows["gpipe"].verdict == "no: device 0 lacks 5.00 GB"
    assert rows["interleaved"].summary is None
    assert rows["interleaved"].verdict.startswith("no plan: stage_device")


def test_the_shortage_is_exact() -> None:
    """With as much memory as the row asks for, the same order fits; with a byte less, not."""
    problem = load_problem(OFFLOAD)
    (row,) = compare_methods(problem, methods=["1f1b"])
    assert row.summary is not None
    for less, fits in ((0, True), (1, False)):
        devices = tuple(
            replace(device, memory_bytes=peak - less)
            for device, peak in zip(problem.devices, row.summary.peak_bytes, strict=True)
        )
        (again,) = compare_methods(replace(problem, devices=devices), methods=["1f1b"])
        assert again.feasible is fits


def test_a_name_that_the_terminal_cannot_show_is_shown_as_far_as_it_goes() -> None:
    problem = replace(load_problem(OFFLOAD), name="mod\u00e8le \u2603")
    for encoding, shown in (("ascii", "mod?le ?"), ("utf-8", problem.name)):
        written = io.BytesIO()
        out = io.TextIOWrapper(written, encoding=encoding)
        print_comparison(problem, compare_methods(problem, methods=["greedy"]), out)
        out.flush()
        assert shown in written.getvalue().decode(encoding)


def test_csv_is_a_table_of_the_frozen_columns() -> None:
    problem = load_problem(OFFLOAD)
    rows = compare_methods(problem, methods=QUICK)
    lines = list(csv.reader(io.StringIO(comparison_csv(rows))))
    assert lines[0] == list(CSV_COLUMNS)
    assert [line[0] for line in lines[1:]] == list(QUICK)
    assert all(len(line) == len(CSV_COLUMNS) for line in lines)
    by_method = {line[0]: dict(zip(CSV_COLUMNS, line, strict=True)) for line in lines[1:]}
    assert float(by_method["1f1b"]["makespan_ms"]) == pytest.approx(312.0)
    assert by_method["1f1b"]["peak_bytes"] == "4000000000 3000000000 2000000000 1000000000"
    assert by_method["interleaved"]["makespan_ms"] == ""


def test_table_marks_the_quickest_that_fits() -> None:
    problem = load_problem(OFFLOAD)
    out = io.StringIO()
    print_comparison(problem, compare_methods(problem, methods=QUICK), out)
    marked = [line for line in out.getvalue().splitlines() if "*" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == "greedy"
    assert "limit 3.00 GB a device" in out.getvalue()


def test_command_prints_table_and_csv() -> None:
    table = optpipe("compare", VECTORS / "tiny.problem.json", "--time-limit", "200ms")
    assert table.code == 0
    assert "makespan ms" in table.out
    values = optpipe("compare", VECTORS / "tiny.problem.json", "--csv", "--time-limit", "200ms")
    assert values.out.startswith("method,feasible,")
    assert values.out.count("\n") == len(CLASSIC_ORDERS) + len(PLANNING_METHODS) + 1
