"""The classic orders against published figures, and what they refuse."""

from __future__ import annotations

import pytest

from bench.peer_problems import peer_problem
from megatron_optpipe.core import OptPipeError, check, summarize, time_orders
from megatron_optpipe.planner.orders import CLASSIC_ORDERS
from tests.zoo import problem

FIGURES = [
    # method, placement, devices, microbatches, makespan, peak (peers' own generators, one clock)
    ("zb-h1", "1", 4, 8, 28.2, 4.0),
    ("zb-h1", "1", 8, 16, 57.8, 8.0),
    ("zb-h2", "1", 4, 8, 27.3, 7.0),
    ("zb-h2", "1", 8, 16, 55.7, 15.0),
    ("interleaved", "4", 4, 8, 27.3, 4.75),
    ("interleaved", "2", 8, 16, 57.2, 11.5),
    ("1f1b", "1", 4, 8, 30.6, 4.0),
    ("gpipe", "1", 4, 8, 30.6, 8.0),
]


@pytest.mark.parametrize(("method", "placement", "devices", "many", "makespan", "peak"), FIGURES)
def test_makespan_and_peak(
    method: str, placement: str, devices: int, many: int, makespan: float, peak: float
) -> None:
    p = peer_problem(devices, many, (1, 1, 1), hop=0.1, placement=placement, level=peak)
    plan = time_orders(p, CLASSIC_ORDERS[method](p), method=method)
    assert check(p, plan) == []
    assert plan.makespan_ms == pytest.approx(makespan)
    assert max(summarize(p, plan).peak_bytes) == pytest.approx(peak * 1e9)


@pytest.mark.parametrize("method", sorted(CLASSIC_ORDERS))
@pytest.mark.parametrize(
    "owners", [(0,), (0, 1), (2, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1, 0)]
)
@pytest.mark.parametrize("many", [1, 2, 4, 7])
def test_any_placement_runs_or_is_refused(method: str, owners: tuple[int, ...], many: int) -> None:
    p = problem(owners, many)
    try:
        orders = CLASSIC_ORDERS[method](p)
    except OptPipeError as refusal:
        assert method != "gpipe"
        assert method in str(refusal)
        return
    assert check(p, time_orders(p, orders, method=method)) == []


def test_interleaved_says_what_it_needs() -> None:
    with pytest.raises(OptPipeError, match="repeated at least twice"):
        CLASSIC_ORDERS["interleaved"](problem((0, 1, 1, 0), 4))
    with pytest.raises(OptPipeError, match="multiple of the 2 devices"):
        CLASSIC_ORDERS["interleaved"](problem((0, 1, 0, 1), 3))
