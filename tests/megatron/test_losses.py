"""The promise of the project: a plan changes when things run, and no digit of what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.jobs import NO_DROPOUT, many, needs_megatron

pytestmark = needs_megatron

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # Dropout is on where a rank has one chunk: then its forwards run in stock's order.
    "4 ranks": (4, ("--pipeline-model-parallel-size", "4")),
    "4 ranks x 2 chunks": (
        4,
        (
            *("--pipeline-model-parallel-size", "4"),
            *("--num-layers-per-virtual-pipeline-stage", "1", *NO_DROPOUT),
        ),
    ),
    "2 ranks x 2 chunks": (
        2,
        (
            *("--pipeline-model-parallel-size", "2"),
            *("--pipeline-model-parallel-layout", "Et*2|t*2|t*2|t*2L", *NO_DROPOUT),
        ),
    ),
}
"""Names of layouts: number of ranks, flags."""

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    num_ranks, flags = LAYOUTS[request.param]
    out: Path = tmp_path_factory.mktemp("layout")
    return many(num_ranks, "order_cases", out, *flags)


def test_the_last_rank_saw_losses_that_fall(ranks: Ranks) -> None:
    losses = [float.fromhex(entry["lm loss"]) for entry in ranks[-1]["stock"]["loss"]]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert len(ranks[-1]["stock"]["valid"]) == 1


def test_losses_gradient_norms_and_parameters_are_those_of_stock(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks):
        for name, case in seen.items():
            for what in ("loss", "grad_norm", "valid", "parameters"):
                assert case[what] == seen["stock"][what], f"{what} of rank {rank} under {name}"


def test_every_kind_of_plan_ran(ranks: Ranks) -> None:
    common = {"zb-h1", "zb-h2", "stock", "measuring", "1f1b", "adversary", "offloading"}
    one_chunk, several = {"slow-copies"}, {"weights-last"}
    assert set(ranks[0]) in (common | one_chunk, common | several)


def test_peak_of_every_iteration_is_within_the_limit(ranks: Ranks) -> None:
    for seen in ranks:
        for name, case in seen.items():
            if "peak_bytes" in case:
                assert len(case["peak_bytes"]) == 10, "from iteration 1 on"
                assert max(case["peak_bytes"]) <= case["limit_bytes"], name


def test_peak_is_the_planned_one_where_nothing_is_offloaded(ranks: Ranks) -> None:
    for seen in ranks:
        for name, case in seen.items():
            if "peak_bytes" in case and not case["planned_moved_bytes"]:
                assert set(case["peak_bytes"]) == {case["planned_peak_bytes"]}, name


def test_offloading_lowers_the_peak_as_planned(ranks: Ranks) -> None:
    for seen in ranks:
        offloading, plain = seen["offloading"], seen["1f1b"]
        assert set(offloading["moved_bytes"]) == {offloading["planned_moved_bytes"]}
        assert max(offloading["peak_bytes"]) <= offloading["limit_bytes"]
        # Copies end when they end, so an iteration may hold more than planned, never above the
        # limit; and some iteration holds no more than planned.
        assert min(offloading["peak_bytes"]) <= offloading["planned_peak_bytes"]
        if plain["planned_peak_bytes"] > offloading["limit_bytes"]:
            assert max(offloading["peak_bytes"]) < min(plain["peak_bytes"])
