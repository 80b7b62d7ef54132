"""Measured files: read as they were recorded, refused in one line where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_optpipe.core import Plan, Problem
from megatron_optpipe.view.measured import MeasurementError, read_measured
from megatron_optpipe.view.timeline import of_plan
from tests.zoo import ZOO


def write_as_measured(problem: Problem, plan: Plan, directory: Path, stretch: float = 1.0) -> None:
    """Files as a run writes them, had every op taken ``stretch`` times its planned time."""
    for number, device in enumerate(plan.devices):
        document: dict[str, Any] = {"schema": "optpipe.measurement/1", "device": number}
        for lane, timed_ops in device.lanes():
            document[lane] = [
                [*op, start * stretch, (start + problem.duration_ms(op)) * stretch]
                for op, start in timed_ops
            ]
        document["peak_bytes"] = (device.peak_bytes or 0) - 1
        document["moved_bytes"] = 0
        (directory / f"measured-rank{number}.json").write_text(json.dumps(document))


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Problem, Plan, Path]:
    problem, plan = ZOO["offload-all-full-duplex"]()
    write_as_measured(problem, plan, tmp_path, stretch=2.0)
    return problem, plan, tmp_path


def test_it_is_the_plan_twice_as_slow(measured: tuple[Problem, Plan, Path]) -> None:
    problem, plan, directory = measured
    planned, found = of_plan(problem, plan), read_measured(problem, directory)
    assert found.makespan_ms == pytest.approx(2 * planned.makespan_ms)
    assert found.bubble == pytest.approx(planned.bubble)
    assert {bar.op for bar in found.bars} == {bar.op for bar in planned.bars}


def test_the_peak_is_the_measured_one(measured: tuple[Problem, Plan, Path]) -> None:
    problem, plan, directory = measured
    found = read_measured(problem, directory)
    for number, device in enumerate(plan.devices):
        assert found.peak_bytes(number) == (device.peak_bytes or 0) - 1


def test_what_the_recorder_writes_is_read() -> None:
    """The real recorder's document has the shape that is read here."""
    pytest.importorskip("torch")
    from megatron_optpipe.runtime.recorder import SCHEMA, Recorder
    from megatron_optpipe.view import measured as reader

    document = Recorder(0).to_dict()
    assert document["schema"] == SCHEMA == reader.SCHEMA
    assert set(reader.KEYS) <= set(document)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "other"}, "schema"),
        ({"device": 9}, "device = 9"),
        ({"device": True}, "device = True"),
        ({"compute": [["F", 0, 0, 1.0]]}, "must be [kind"),
        ({"compute": [["O", 0, 0, 1.0, 2.0]]}, "the kind"),
        ({"compute": [["F", 7, 0, 1.0, 2.0]]}, "the stage"),
        ({"compute": [["F", 0, 99, 1.0, 2.0]]}, "the microbatch"),
        ({"compute": [["F", 0, 0, 2.0, 1.0]]}, "before it starts"),
        ({"compute": [["F", 0, 0, "a", 1.0]]}, "numbers"),
        ({"peak_bytes": -1}, "peak_bytes"),
    ],
)
def test_files_that_do_not_fit(
    measured: tuple[Problem, Plan, Path], change: dict[str, Any], words: str
) -> None:
    problem, _, directory = measured
    file = directory / "measured-rank0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(MeasurementError) as caught:
        read_measured(problem, directory)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_without_a_file_is_named(measured: tuple[Problem, Plan, Path]) -> None:
    problem, _, directory = measured
    (directory / "measured-rank2.json").unlink()
    with pytest.raises(MeasurementError, match="device 2"):
        read_measured(problem, directory)
    with pytest.raises(MeasurementError, match="is no directory"):
        read_measured(problem, directory / "measured-rank0.json")
