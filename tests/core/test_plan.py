"""Plan files: what is written is read again, equal bytes, and the short cut past the validator."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_optpipe.core import Plan, PlanError, load_plan, save_plan
from megatron_optpipe.core.plan import _without_sound_ops
from megatron_optpipe.core.schema import require_schema
from tests.zoo import ZOO

PLAN = Path(__file__).parent / "vectors" / "tiny.plan.json"
ODD_OPS: tuple[Any, ...] = (
    ["F", 0, 0, 0.0],
    ["F", 0, 0, 0],
    ["F", 0, 0, -0.0],
    ["F", 0.0, 0, 0.0],
    ["F", True, 0, 0.0],
    ["F", 0, 0, True],
    ["F", -1, 0, 0.0],
    ["F", 0, -1, 0.0],
    ["F", 0, 0, -1.0],
    ["F", 0, 0],
    ["F", 0, 0, 0.0, 0.0],
    ["X", 0, 0, 0.0],
    ["", 0, 0, 0.0],
    [["F"], 0, 0, 0.0],
    ["F", "0", 0, 0.0],
    ["F", 0, 0, None],
    {"kind": "F"},
    "F000",
    None,
    [],
)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_plan_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    _, plan = ZOO[name]()
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.to_json() == (tmp_path / "plan.json").read_text()


def _verdict(document: Any) -> bool:
    try:
        require_schema(document, "plan.schema.json", PlanError)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("op", ODD_OPS, ids=repr)
@pytest.mark.parametrize("lane", ["compute", "offload", "reload"])
def test_the_short_cut_judges_as_the_schema_does(op: Any, lane: str) -> None:
    document = json.loads(PLAN.read_text())
    device = document["devices"][1]
    device[lane] = [*device.get(lane, []), copy.deepcopy(op)]
    assert _verdict(document) == _verdict(_without_sound_ops(document))


@pytest.mark.parametrize("devices", [None, {}, [], [None], [[]], [{}], [{"compute": {}}]])
def test_the_short_cut_leaves_other_shapes_to_the_schema(devices: Any) -> None:
    document = json.loads(PLAN.read_text()) | {"devices": devices}
    assert not _verdict(_without_sound_ops(document))
    with pytest.raises(PlanError):
        Plan.from_dict(document)


def test_the_short_cut_leaves_sound_ops_out_and_changes_nothing() -> None:
    document = json.loads(PLAN.read_text())
    before = copy.deepcopy(document)
    assert _without_sound_ops(document)["devices"][0]["compute"] == []
    assert document == before
