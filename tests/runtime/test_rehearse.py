"""Rehearsals: every odd plan ends, whatever sends do; faults end everybody."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_optpipe.core import Op, PlanInvalid, Stage
from megatron_optpipe.runtime.rehearse import RehearsalFailed, rehearse
from megatron_optpipe.runtime.rehearse.pieces import Pieces, fitting_byte_scale
from tests.zoo import ZOO

OFFLOADING = "offload-all-shared-switch"


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_plan_ends(name: str, rendezvous: bool) -> None:
    problem, plan = ZOO[name]()
    report = rehearse(problem, plan, iterations=2, rendezvous=rendezvous)
    assert report.achieved_ms >= 0.999 * report.planned_ms
    assert len(report.iterations_ms) == 2
    for device, planned in zip(report.devices, plan.devices):
        lanes = [device.measurement[lane] for lane in ("compute", "offload", "reload")]
        assert [len(lane) for lane in lanes] == [len(lane) for _, lane in planned.lanes()]
        assert 0 < device.peak_bytes <= device.memory_bytes
        assert device.moved_bytes == pytest.approx(device.planned_moved_bytes, rel=1e-4)
        # Nothing else holds what was offloaded.
        assert device.freed_bytes == device.moved_bytes


def test_the_report_reads_well() -> None:
    problem, plan = ZOO[OFFLOADING]()
    report = rehearse(problem, plan, 2.0, iterations=1)
    assert report.planned_ms == plan.makespan_ms * 2.0
    text = str(report)
    assert "planned 42.6 ms" in text
    assert "us per op" in text
    assert f"{report.ratio:.3f}" in text
    assert len(text.splitlines()) == 4 + problem.num_devices
    assert json.loads(json.dumps(report.to_dict()))["ratio"] == report.ratio


def test_slow_copies_still_end() -> None:
    problem, plan = ZOO[OFFLOADING]()
    report = rehearse(problem, plan, iterations=1, slow_copy_ms=5.0)
    assert all(d.peak_bytes <= d.memory_bytes for d in report.devices)


@pytest.mark.parametrize("fail_at", [Op("F", 2, 1), Op("B", 3, 1)])
def test_a_fault_ends_all_processes_by_name(fail_at: Op) -> None:
    problem, plan = ZOO[OFFLOADING]()
    place = [op for op, _ in plan.devices[fail_at.stage].compute].index(fail_at) + 1
    with pytest.raises(RehearsalFailed) as failure:
        rehearse(problem, plan, iterations=1, fail_at=fail_at)
    wanted = f"rank {fail_at.stage} failed at op {fail_at}, position {place} of 12 compute ops"
    assert wanted in str(failure.value)
    assert "\n" not in str(failure.value)
    # All others needed that op: every process ended by itself, and each knew why.
    assert sorted(failure.value.faults) == list(range(problem.num_devices))
    assert all(wanted in text for text in failure.value.faults.values())


def test_an_invalid_plan_is_refused_before_anything_starts() -> None:
    problem, plan = ZOO["v-shape"]()
    with pytest.raises(PlanInvalid):
        rehearse(problem, replace(plan, makespan_ms=plan.makespan_ms / 2))


@pytest.mark.parametrize("frees", [-30, 0, 40, 100])
@pytest.mark.parametrize("offload", [0, 35, 100])
@pytest.mark.parametrize("byte_scale", [1.0, 0.37, 0.011])
def test_pieces_never_exceed_the_plan(frees: int, offload: int, byte_scale: float) -> None:
    stage = Stage(1.0, 1.0, 1.0, 100, frees, offload)
    pieces = Pieces.of(stage, byte_scale)
    whole = pieces.moved_freed + pieces.moved_kept + pieces.stays_freed + pieces.stays_kept
    assert min(pieces.moved_freed, pieces.moved_kept, pieces.stays_freed, pieces.stays_kept) >= 0
    assert whole <= 100 * byte_scale
    assert pieces.stays_freed + pieces.stays_kept <= (100 - offload) * byte_scale
    kept = pieces.moved_kept + pieces.stays_kept
    assert kept <= (100 - max(frees, 0)) * byte_scale
    assert pieces.backward_takes <= max(-frees, 0) * byte_scale
    if byte_scale == 1.0:
        assert (whole, kept) == (100, 100 - max(frees, 0))
        assert pieces.moved_freed + pieces.moved_kept == offload


def test_bytes_are_scaled_down_to_what_fits() -> None:
    problem, plan = ZOO["one-at-a-time"]()
    held = 4 * 10**9  # one activation of 1 GB a device
    assert fitting_byte_scale(problem, plan, 1.0, 10 * held) == 1.0
    assert fitting_byte_scale(problem, plan, 1.0, held // 4) == pytest.approx(0.25)
    problem, plan = ZOO["offload-all-full-duplex"]()
    slow = fitting_byte_scale(problem, plan, 1.0, 10**15)
    assert fitting_byte_scale(problem, plan, 2.0, 10**15) == pytest.approx(2 * slow)
