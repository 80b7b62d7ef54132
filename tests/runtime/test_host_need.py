"""The worst case of host buffers, against plans whose worst case is known."""

from __future__ import annotations

from itertools import accumulate

import pytest

from megatron_optpipe.core import Compute, Op, Program, lower
from megatron_optpipe.runtime.host_need import host_buffers
from tests.zoo import ZOO


def program(waits: dict[Op, tuple[Op, ...]]) -> Program:
    """F0 F1 F2 B0 B1 B2, all offloaded."""
    compute = [Op(kind, 0, j) for kind in "FB" for j in range(3)]
    waits = {
        **{Op("O", 0, j): (Op("F", 0, j),) for j in range(3)},
        **{Op("R", 0, j): (Op("O", 0, j),) for j in range(3)},
        **{Op("B", 0, j): (Op("R", 0, j),) for j in range(3)},
    } | waits
    lanes = [tuple(Op(kind, 0, j) for j in range(3)) for kind in "OR"]
    return Program(0, tuple(Compute(op) for op in compute), lanes[0], lanes[1], waits)


def test_nothing_forces_a_reload_before_the_last_offload() -> None:
    assert host_buffers(program({})) == {0: 3}


def test_a_wait_for_a_reload_bounds_the_need() -> None:
    waits = {Op("O", 0, 2): (Op("F", 0, 2), Op("R", 0, 0))}
    assert host_buffers(program(waits)) == {0: 2}


@pytest.mark.parametrize("name", sorted(n for n in ZOO if n.startswith("offload")))
def test_the_plan_itself_never_needs_more(name: str) -> None:
    problem, plan = ZOO[name]()
    for lowered, device in zip(lower(problem, plan), plan.devices):
        changes = [(at, 1) for _, at in device.offload]
        changes += [(at + problem.duration_ms(op), -1) for op, at in device.reload]
        planned = max(accumulate(change for _, change in sorted(changes)))
        (need,) = host_buffers(lowered).values()  # one stage a device
        assert planned <= need <= problem.num_microbatches


def test_gpipe_on_links_of_its_own_has_all_microbatches_on_the_host() -> None:
    problem, plan = ZOO["offload-all-full-duplex"]()
    assert [host_buffers(p) for p in lower(problem, plan)] == [{d: 4} for d in range(4)]


def test_nothing_is_needed_without_offload() -> None:
    problem, plan = ZOO["v-shape"]()
    assert [host_buffers(p) for p in lower(problem, plan)] == [{}, {}]
