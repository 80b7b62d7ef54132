"""The checker: the contract's examples, and mutations of valid plans."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import (
    Plan,
    PlanInvalid,
    TimedOp,
    check,
    load_plan,
    load_problem,
    render_grid,
    require_valid,
)
from megatron_optpipe.core.plan import LANES, DevicePlan
from tests.core.naive import truly_valid
from tests.zoo import ZOO

VECTORS = Path(__file__).parent / "vectors"
BROKEN = json.loads((VECTORS / "tiny.broken-plans.json").read_text())


def test_good_example_passes() -> None:
    problem = load_problem(VECTORS / "tiny.problem.json")
    assert check(problem, load_plan(VECTORS / "tiny.plan.json")) == []


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_example_fails_by_its_rule(name: str) -> None:
    problem = load_problem(VECTORS / "tiny.problem.json")
    found = check(problem, Plan.from_dict(BROKEN[name]["plan"]))
    assert found[0].rule == BROKEN[name]["rule"]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_zoo_is_valid_by_both_judges(name: str) -> None:
    problem, plan = ZOO[name]()
    assert check(problem, plan) == []
    assert truly_valid(problem, plan)


def test_message_is_one_line_naming_rule_op_and_device() -> None:
    problem = load_problem(VECTORS / "tiny.problem.json")
    with pytest.raises(PlanInvalid) as caught:
        require_valid(problem, Plan.from_dict(BROKEN["missing_w"]["plan"]))
    text = str(caught.value)
    assert "\n" not in text
    assert "rule 1" in text
    assert "W(1,2)" in text
    assert "device 1" in text


def test_grid_points_at_the_wrong_cell() -> None:
    problem = load_problem(VECTORS / "tiny.problem.json")
    plan = Plan.from_dict(BROKEN["too_early_for_p2p"]["plan"])
    grid = render_grid(problem, plan, check(problem, plan)[0])
    pointed = [line for line in grid.splitlines() if line.startswith("->")]
    assert len(pointed) == 1
    assert ">>F(1,0)<<" in pointed[0]


def test_false_peak_and_impossible_bound_are_refused() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    peak = plan.devices[0].peak_bytes
    assert peak is not None
    lying = replace(plan.devices[0], peak_bytes=peak - 1)
    rules = {v.rule for v in check(problem, replace(plan, devices=(lying, *plan.devices[1:])))}
    assert rules == {"7"}
    bound = replace(plan, lower_bound_ms=plan.makespan_ms + 0.001)
    assert {v.rule for v in check(problem, bound)} == {"10"}


def _lanes(plan: Plan) -> list[list[list[TimedOp]]]:
    return [[list(lane) for _, lane in device.lanes()] for device in plan.devices]


def _rebuilt(plan: Plan, lanes: list[list[list[TimedOp]]]) -> Plan:
    devices = tuple(
        DevicePlan(**{name: tuple(lane) for name, lane in zip(LANES, three)}) for three in lanes
    )
    return replace(plan, devices=devices)


def _mutate(plan: Plan, dice: random.Random) -> Plan:
    """Delete, duplicate, swap, move or retime one op; retimed lists stay in time order."""
    lanes = _lanes(plan)
    full = [(d, x) for d, three in enumerate(lanes) for x, lane in enumerate(three) if lane]
    d, x = dice.choice(full)
    lane = lanes[d][x]
    at = dice.randrange(len(lane))
    how = dice.choice(("delete", "duplicate", "swap", "retime", "move"))
    if how == "delete":
        del lane[at]
    elif how == "duplicate":
        lane.insert(at, lane[at])
    elif how == "swap":
        other = dice.randrange(len(lane))
        first, second = lane[at], lane[other]
        lane[at], lane[other] = (
            TimedOp(second.op, first.start_ms),
            TimedOp(first.op, second.start_ms),
        )
    elif how == "retime":
        shift = dice.choice((-2.0, -0.5, -0.01, 0.01, 0.5, 2.0))
        lane[at] = TimedOp(lane[at].op, max(0.0, lane[at].start_ms + shift))
        lane.sort(key=lambda timed: timed.start_ms)
    else:
        to_d, to_x = dice.choice(full)
        lanes[to_d][to_x].append(lane.pop(at))
        lanes[to_d][to_x].sort(key=lambda timed: timed.start_ms)
    return _rebuilt(plan, lanes)


def test_mutants_are_rejected_and_the_rest_are_truly_valid() -> None:
    """At least 99 % of the mutants that change the plan's meaning are rejected.

    A mutant is judged by two judges that share no code. Retiming an op into a gap that is there
    (every plan has bubbles) gives another valid plan, so the share of rejections is taken over
    the mutants that the naive judge calls invalid, and each accepted one must be valid for both.
    """
    dice = random.Random(20251006)
    mutants = invalid = rejected = 0
    for name in sorted(ZOO):
        problem, plan = ZOO[name]()
        for _ in range(150):
            mutant = _mutate(plan, dice)
            if mutant.to_json() == _rebuilt(plan, _lanes(plan)).to_json():
                continue
            mutants += 1
            accepted = check(problem, mutant) == []
            valid = truly_valid(problem, mutant)
            if accepted:
                assert valid, f"{name}: accepted, but not valid: {mutant.to_json()}"
            if not valid:
                invalid += 1
                rejected += not accepted
    assert invalid > 1500
    assert rejected >= 0.99 * invalid
    print(f"{mutants} mutants, {invalid} of them invalid, {rejected} rejected")
