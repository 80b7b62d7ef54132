"""The plan cache: exact hits, similar starts, corrupt entries, ranks at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import Plan, Problem, check
from megatron_optpipe.planner import cache as cache_module
from megatron_optpipe.planner import make_plan
from megatron_optpipe.planner.cache import PlanCache
from megatron_optpipe.planner.options import PlannerOptions
from tests.planner.small_problems import small_problem

OPTIONS = PlannerOptions(method="greedy")


def _problem(factor: float = 1.0, **changes: object) -> Problem:
    problem = small_problem(51)
    stages = tuple(replace(stage, forward_ms=stage.forward_ms * factor) for stage in problem.stages)
    return replace(problem, stages=stages, **changes)  # type: ignore[arg-type]


def _planned(problem: Problem) -> Plan:
    return make_plan(problem, OPTIONS)


def test_a_plan_comes_back_byte_for_byte(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "deep" / "cache")
    problem = _problem()
    assert cache.get(problem, OPTIONS) is None
    plan = _planned(problem)
    cache.put(problem, OPTIONS, plan)
    again = PlanCache(tmp_path / "deep" / "cache").get(problem, OPTIONS)
    assert again is not None
    assert again.to_json() == plan.to_json()


def test_other_options_or_numbers_are_other_keys(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    problem = _problem()
    cache.put(problem, OPTIONS, _planned(problem))
    assert cache.get(problem, replace(OPTIONS, seed=1)) is None
    assert cache.get(problem, replace(OPTIONS, time_limit_s=99.0)) is None
    assert cache.get(_problem(1.01), OPTIONS) is None
    moved = replace(OPTIONS, cache_dir=tmp_path)
    assert cache.get(problem, moved) is not None, "the place of the cache is no part of the key"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "nonsense",
        lambda text: text.replace("optpipe.cache/1", "optpipe.cache/9"),
        lambda text: json.dumps({**json.loads(text), "plan": {}}),
        lambda text: json.dumps({**json.loads(text), "problem": 3}),
        lambda text: "[" * 100_000,
        lambda text: "\xff",
    ],
)
def test_a_corrupt_entry_is_ignored_with_one_warning(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cache = PlanCache(tmp_path)
    problem = _problem()
    cache.put(problem, OPTIONS, _planned(problem))
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(damage(path.read_text()).encode("latin-1"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get(problem, OPTIONS) is None
        assert cache.nearest(problem) is None
    assert len(caught) == 1
    assert "ignored" in str(caught[0].message)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    problem = _problem()
    cache.put(problem, OPTIONS, _planned(problem))
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    os.mkfifo(path)
    found: list[Plan | None] = []
    reader = threading.Thread(target=lambda: found.append(cache.get(problem, OPTIONS)), daemon=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader.start()
        reader.join(30)
    assert found == [None]
    assert ["ignored" in str(warning.message) for warning in caught] == [True]


def test_an_entry_with_an_invalid_plan_is_ignored(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    problem = _problem()
    plan = _planned(problem)
    lane = plan.devices[0].compute
    broken = replace(
        plan.devices[0],
        compute=(lane[0], *(timed._replace(start_ms=timed.start_ms + 0.05) for timed in lane[1:])),
    )
    cache.put(problem, OPTIONS, replace(plan, devices=(broken, *plan.devices[1:])))
    with pytest.warns(RuntimeWarning, match="not valid"):
        assert cache.get(problem, OPTIONS) is None


def test_a_similar_problem_gives_a_valid_start(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    old, far = _problem(), _problem(3.0)
    cache.put(old, OPTIONS, _planned(old))
    cache.put(far, OPTIONS, _planned(far))
    new = _problem(1.04)
    start = cache.nearest(new)
    assert start is not None
    assert not check(new, start)
    assert start.makespan_ms <= _planned(old).makespan_ms * 1.04 + 1e-6
    assert cache.nearest(_problem(1.5)) is None, "50 % is not similar"
    assert cache.nearest(small_problem(3)) is None, "another shape"


def test_a_start_that_no_longer_fits_is_not_given(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    old = small_problem(28)
    cache.put(old, OPTIONS, _planned(old))
    tight = replace(
        old,
        devices=tuple(
            replace(device, memory_bytes=int(device.memory_bytes * 0.9)) for device in old.devices
        ),
    )
    start = cache.nearest(tight)
    assert start is None or not check(tight, start)


def test_a_directory_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = PlanCache(blocked / "cache")
    problem = _problem()
    with pytest.warns(RuntimeWarning, match="not kept"):
        cache.put(problem, OPTIONS, _planned(problem))
    assert cache.get(problem, OPTIONS) is None
    assert cache.nearest(problem) is None


def test_old_entries_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_ENTRIES", 3)
    cache = PlanCache(tmp_path)
    problem = _problem()
    plan = _planned(problem)
    for seed in range(6):
        cache.put(problem, replace(OPTIONS, seed=seed), plan)
    assert len(list(tmp_path.glob("*.json"))) == 3


def _put_often(directory: str, seed: int) -> None:
    cache = PlanCache(directory)
    problem = _problem()
    plan = _planned(problem)
    for _ in range(40):
        cache.put(problem, OPTIONS, replace(plan, solve_ms=float(seed)))


def test_ranks_at_once_leave_whole_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_put_often, args=(str(tmp_path), seed)) for seed in range(2)]
    for rank in ranks:
        rank.start()
    cache = PlanCache(tmp_path)
    problem = _problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(rank.is_alive() for rank in ranks):
            found = cache.get(problem, OPTIONS)
            assert found is None or found.solve_ms in (0.0, 1.0)
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
