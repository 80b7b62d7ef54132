"""The Gantt picture holds every op, its number where it is readable, and the limits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import Problem
from megatron_optpipe.view.gantt import draw_gantt, save_gantt
from megatron_optpipe.view.labels import SMALLEST_READABLE, Labels
from megatron_optpipe.view.style import COLOURS, shade
from megatron_optpipe.view.timeline import of_plan
from tests.zoo import ZOO

pytest.importorskip("matplotlib")


def _bars(problem_and_plan: object, measured: bool) -> int:
    """How many bars the upper axes hold, without the grey ones of idle time."""
    problem, plan = problem_and_plan  # type: ignore[misc]
    timeline = of_plan(problem, plan, "measured") if measured else None
    figure = draw_gantt(problem, plan, timeline)
    axes = max(figure.axes, key=lambda a: a.get_position().y0)
    collections = [c for c in axes.collections if type(c).__name__ == "PolyCollection"]
    return sum(len(c.get_paths()) for c in collections) - problem.num_devices * (1 + measured)


@pytest.mark.parametrize("name", ["single-device", "v-shape", "offload-all-full-duplex"])
@pytest.mark.parametrize("measured", [False, True])
def test_every_op_is_drawn_once(name: str, measured: bool) -> None:
    pair = ZOO[name]()
    assert _bars(pair, measured) == len(pair[1].starts()) * (1 + measured)


def test_title_and_labels_tell_the_figures() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    figure = draw_gantt(problem, plan, of_plan(problem, plan, "measured"))
    texts = " ".join(t.get_text() for t in figure.texts)
    assert f"makespan {plan.makespan_ms:.2f} ms" in texts
    assert "bubble" in texts
    assert "measured / planned 1.000" in texts
    memory = min(figure.axes, key=lambda a: a.get_position().y0)
    labels = " ".join(t.get_text() for t in memory.texts)
    assert labels.count("limit 2.00 GB") == problem.num_devices


def test_the_limit_is_a_line_on_every_device() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    figure = draw_gantt(problem, plan)
    memory = min(figure.axes, key=lambda a: a.get_position().y0)
    dashed = [line for line in memory.lines if line.get_linestyle() == "--"]
    assert len(dashed) == problem.num_devices


def test_the_same_plan_gives_the_same_file(tmp_path: Path) -> None:
    problem, plan = ZOO["v-shape"]()
    for ending in ("svg", "png"):
        files = [tmp_path / f"{name}.{ending}" for name in "ab"]
        for file in files:
            save_gantt(problem, plan, file)
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["$x$ and $\\frac{", "\u6d4b\u8bd5", "two\nlines", "x" * 5000, ""])
def test_any_name_makes_a_title(tmp_path: Path, name: str) -> None:
    problem, plan = ZOO["single-device"]()
    problem = replace(problem, name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_gantt(problem, plan, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0


def test_a_number_is_written_where_it_is_readable_only() -> None:
    labels = Labels(points_per_ms=1.0)
    assert labels.add("7", 0.0, 20.0, 0.0, 0.3, "white")
    assert not labels.add("7", 0.0, 2.0, 0.0, 0.3, "white")
    assert not labels.add("7", 0.0, 20.0, 0.0, 0.05, "white")
    assert not labels.add("123", 0.0, SMALLEST_READABLE, 0.0, 0.3, "white")


def test_chunks_of_a_device_have_different_colours() -> None:
    assert shade(COLOURS["F"], 0, 4) == COLOURS["F"]
    assert len({shade(COLOURS["F"], chunk, 4) for chunk in range(4)}) == 4


def test_many_devices_do_not_make_an_endless_picture() -> None:
    from megatron_optpipe.core import time_orders
    from tests.zoo import one_at_a_time
    from tests.zoo import problem as make_problem

    problem: Problem = make_problem(tuple(range(16)), 64)
    plan = time_orders(problem, one_at_a_time(problem), method="serial")
    width_in, height_in = draw_gantt(problem, plan).get_size_inches()
    assert width_in < 50
    assert height_in < 30
