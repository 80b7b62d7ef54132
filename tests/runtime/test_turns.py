"""Links that devices share: one at a time, in order, across iterations."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from megatron_optpipe.core import Op, lower
from megatron_optpipe.runtime.abort import Abort
from megatron_optpipe.runtime.faults import RuntimeFault
from megatron_optpipe.runtime.turns import StoreTurns, awaited_elsewhere, takes_turns
from tests.zoo import ZOO

A, B = Op("O", 0, 0), Op("O", 1, 0)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_who_waits_for_whom_is_known_on_both_sides(name: str) -> None:
    problem, plan = ZOO[name]()
    programs = lower(problem, plan)
    for program in programs:
        own = {*program.offload, *program.reload}
        foreign = {n for op in own for n in program.waits.get(op, ()) if n.kind in "OR"} - own
        for need in foreign:
            assert need in awaited_elsewhere(programs, problem.device_of(need.stage))
    shares = [takes_turns(programs, d) for d in range(problem.num_devices)]
    expected = any(word in name for word in ("switch", "bus", "host-limit"))
    assert shares == [expected] * problem.num_devices


def test_a_turn_is_waited_for_in_its_own_iteration() -> None:
    store = HashStore()
    mine = StoreTurns(lambda: store, frozenset({A}), Abort())
    other = StoreTurns(lambda: store, frozenset(), Abort())
    passed: list[int] = []
    step = threading.Semaphore(0)

    def wait() -> None:
        for iteration in range(4):
            other.begin()
            other.wait(A)
            passed.append(iteration)
            step.release()

    mine.begin()
    mine.signal(B)  # nobody waits for it: not written
    assert not store.check([f"0/{B}"])
    mine.signal(A)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    for iteration in range(1, 4):
        assert step.acquire(timeout=20.0)
        mine.begin()
        assert len(passed) == iteration
        mine.signal(A)
    thread.join(timeout=20.0)
    assert passed == [0, 1, 2, 3]
    assert not store.check([f"0/{A}"])  # removed two iterations later


def test_a_fault_ends_the_wait() -> None:
    abort = Abort()
    turns = StoreTurns(HashStore, frozenset(), abort)
    turns.begin()
    abort.fail(RuntimeFault("elsewhere", rank=3, op=None, position="x"))
    with pytest.raises(RuntimeFault, match="elsewhere"):
        turns.wait(A)
