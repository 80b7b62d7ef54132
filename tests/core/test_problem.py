"""Reading and refusing problem and plan files."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_optpipe.core import (
    Op,
    PlanError,
    Problem,
    ProblemError,
    load_plan,
    load_problem,
    save_plan,
    save_problem,
)
from tests.zoo import ZOO, problem

VECTORS = Path(__file__).parent / "vectors"
OFFLOAD = json.loads((VECTORS / "offload4x8.problem.json").read_text())


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, key, value = path

    def change(document: Any) -> None:
        for step in way:
            document = document[step]
        document[key] = value

    return change


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "wrong type": (_set("num_microbatches", "8"), "num_microbatches"),
    "bool for int": (_set("num_microbatches", True), "num_microbatches"),
    "fraction for int": (_set("num_microbatches", 2.5), "num_microbatches"),
    "unknown key": (_set("colour", 1), "colour"),
    "unknown stage key": (_set("stages", 0, "colour", 1), "colour"),
    "unknown schema": (_set("schema", "optpipe.problem/2"), "schema"),
    "unknown link": (_set("devices", 1, "d2h", "nowhere"), "nowhere"),
    "stage on no device": (_set("stage_device", [0, 1, 2, 7]), "stage_device[3]"),
    "device without stage": (_set("stage_device", [0, 1, 2, 2]), "devices[3]"),
    "too few stage_device": (_set("stage_device", [0, 1, 2]), "stage_device"),
    "frees above activation": (
        _set("stages", 2, "backward_frees_bytes", 2_000_000_000),
        "backward_frees_bytes",
    ),
    "offload above activation": (_set("stages", 2, "offload_bytes", 2 * 10**9), "offload_bytes"),
    "zero forward": (_set("stages", 0, "forward_ms", 0), "forward_ms"),
    "forward too short": (
        _set("stages", 0, "forward_ms", 9e-6),
        "forward_ms",
    ),
    "backward too short": (_set("stages", 1, "backward_input_ms", 1e-9), "backward_input_ms"),
    "ops too long to resolve": (_set("stages", 0, "forward_ms", 1e10), "all ops"),
    "transfers too long to resolve": (_set("links", "d2h0", "gbps", 1e-9), "all transfers"),
    "negative weight": (_set("stages", 0, "backward_weight_ms", -1), "backward_weight_ms"),
    "negative memory": (_set("devices", 0, "memory_bytes", -1), "memory_bytes"),
    "zero bandwidth": (_set("links", "d2h0", "gbps", 0), "gbps"),
    "negative latency": (_set("links", "d2h0", "latency_ms", -0.1), "latency_ms"),
    "negative hop": (_set("p2p_ms", -1), "p2p_ms"),
    "ragged matrix": (_set("p2p_ms", [[0.0, 1.0], [1.0]]), "p2p_ms"),
    "small matrix": (_set("p2p_ms", [[0.0]]), "p2p_ms"),
    "no stages": (_set("stages", []), "stages"),
    "no microbatch": (_set("num_microbatches", 0), "num_microbatches"),
    "negative host": (_set("host_memory_bytes", -1), "host_memory_bytes"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals_name_the_field_in_one_line(name: str) -> None:
    change, field = REFUSED[name]
    document = copy.deepcopy(OFFLOAD)
    change(document)
    with pytest.raises(ProblemError) as caught:
        Problem.from_dict(document)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "stages", "links", "p2p_ms", "devices"])
def test_missing_key_is_named(key: str) -> None:
    document = {k: v for k, v in OFFLOAD.items() if k != key}
    with pytest.raises(ProblemError, match=key):
        Problem.from_dict(document)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": NaN}',
        '{"p2p_ms": Infinity}',
        '{"p2p_ms": 1e999}',
        '{"schema": 1, "schema": 2}',
        "{",
        "",
        "[" * 100_000,
        "\ud800",
    ],
)
def test_broken_json_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for load, error in ((load_problem, ProblemError), (load_plan, PlanError)):
        with pytest.raises(error) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert "p.json" in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ProblemError, match="cannot be read"):
            load_problem(path)


def test_numbers_must_be_finite_in_code_too() -> None:
    p = problem()
    with pytest.raises(ProblemError, match="finite"):
        replace(p, p2p_ms=math.nan)


def test_digest_is_of_canonical_json() -> None:
    p = load_problem(VECTORS / "tiny.problem.json")
    assert p.digest == "d860e38c0cee1b1bee46452875543116ec2c255c6268e8f8eda8ed8814267e7b"
    assert replace(p, name="other", notes="more").digest == p.digest
    assert replace(p, num_microbatches=4).digest != p.digest


def test_round_trips(tmp_path: Path) -> None:
    for name in sorted(ZOO):
        p, plan = ZOO[name]()
        save_problem(p, tmp_path / "p.json")
        save_plan(plan, tmp_path / "plan.json")
        again = load_problem(tmp_path / "p.json")
        assert again == p
        assert again.digest == p.digest
        assert load_plan(tmp_path / "plan.json") == plan
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "plan.json"]


def test_a_file_keeps_its_digest_when_read_and_written(tmp_path: Path) -> None:
    p = load_problem(VECTORS / "offload4x8.problem.json")
    save_problem(p, tmp_path / "copy.json")
    assert load_problem(tmp_path / "copy.json").digest == p.digest


def test_durations_and_memory_changes() -> None:
    p = load_problem(VECTORS / "offload4x8.problem.json")
    assert p.duration_ms(Op("O", 0, 0)) == pytest.approx(0.05 + 9.0)  # 0.9e9 bytes at 100 GB/s
    assert p.memory_change(Op("F", 0, 0)) == (10**9, 0)
    assert p.memory_change(Op("B", 0, 0)) == (0, -500_000_000)
    for stage in p.stages:
        total = sum(sum(p.memory_change(Op(kind, 0, 0))) for kind in "FBW")
        assert total == 0, stage
    needy = replace(p, stages=(replace(p.stages[0], backward_frees_bytes=-7), *p.stages[1:]))
    assert needy.memory_change(Op("B", 0, 0)) == (7, 0)
    assert needy.memory_change(Op("W", 0, 0)) == (0, -(10**9 + 7))


def test_threads_may_write_one_file_at_a_time_and_it_is_always_whole(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    written = [problem(), problem((0, 1, 2, 3), 8)]
    failed: list[BaseException] = []

    def write_often(which: Problem) -> None:
        try:
            for _ in range(50):
                save_problem(which, path)
                assert load_problem(path) in written
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write_often, args=(which,)) for which in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["problem.json"]
