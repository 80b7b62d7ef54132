"""The first fault is everyone's."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from torch.distributed import HashStore, PrefixStore

from megatron_optpipe.core import Op
from megatron_optpipe.runtime.abort import Abort, StoreAbort
from megatron_optpipe.runtime.faults import Aborted, RuntimeFault


def fault(rank: int, microbatch: int = 0) -> RuntimeFault:
    op = Op("F", rank, microbatch)
    return RuntimeFault(f"rank {rank} failed at {op}", rank=rank, op=op, position="position 3 of 9")


def test_the_first_fault_is_kept_and_interrupts_once() -> None:
    abort, calls = Abort(), []
    abort.on_fault(lambda: calls.append(1))
    abort.check()
    first = fault(0)
    abort.fail(first)
    abort.fail(fault(1))
    with pytest.raises(RuntimeFault) as raised:
        abort.check()
    assert raised.value is first
    assert calls == [1]


def test_others_learn_rank_op_and_position() -> None:
    store = HashStore()
    ranks = [StoreAbort(PrefixStore("x", store), r, poll_s=0.01, grace_s=None) for r in range(3)]
    interrupted = threading.Event()
    ranks[2].on_fault(interrupted.set)
    ranks[1].fail(fault(1, 4))
    ranks[0].fail(fault(0))  # later, and mostly a consequence
    assert ranks[2].wait(10.0)
    assert interrupted.wait(10.0)
    with pytest.raises(Aborted, match=r"rank 1 failed at F\(1,4\)") as raised:
        ranks[2].check()
    assert (raised.value.rank, raised.value.op) == (1, Op("F", 1, 4))
    assert raised.value.position == "position 3 of 9"
    with pytest.raises(Aborted, match=r"rank 1 failed at F\(1,4\)"):
        ranks[0].check()  # its own came second
    for rank in ranks:
        rank.close()


def test_a_later_fault_gives_way_even_where_the_note_was_not_seen() -> None:
    store = HashStore()
    never = [StoreAbort(PrefixStore("x", store), r, poll_s=600, grace_s=None) for r in range(2)]
    first, second = fault(1), fault(0)
    never[1].fail(first)
    never[0].fail(second)
    assert never[1].fault is first
    assert str(never[0].fault) == str(first)
    for rank in never:
        rank.close()


def test_a_closed_hub_watches_no_more() -> None:
    abort = StoreAbort(HashStore(), 0, poll_s=0.01)
    abort.close()
    assert not any(t.name == "abort-watch" and t.is_alive() for t in threading.enumerate())


STUCK = """
import time
from torch.distributed import HashStore
from megatron_optpipe.core import Op
from megatron_optpipe.runtime.abort import StoreAbort
from megatron_optpipe.runtime.faults import RuntimeFault

abort = StoreAbort(HashStore(), 4, poll_s=0.01, grace_s=0.05)
abort.fail(RuntimeFault("rank 4 failed at op F(4,0)", rank=4, op=Op("F", 4, 0), position="x"))
time.sleep(60)
"""


def test_a_process_that_is_stuck_is_ended_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 70
    assert done.stderr.splitlines()[-1] == (
        "optpipe: rank 4 failed at op F(4,0); rank 4 did not end within 0.05 s by itself "
        "and is ended now"
    )
