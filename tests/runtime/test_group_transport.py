"""Messages over a real gloo group."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron_optpipe.core import Message, Op, lower
from megatron_optpipe.runtime.abort import StoreAbort
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.faults import RuntimeFault
from megatron_optpipe.runtime.group_transport import GroupTransport, MessageSpec, used_pairs
from megatron_optpipe.runtime.store import ActivationStore
from megatron_optpipe.runtime.stores import group_connections
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from megatron_optpipe.runtime.transport import PeerLost
from megatron_optpipe.runtime.turns import StoreTurns, awaited_elsewhere
from tests.runtime.processes import run_ranks
from tests.runtime.toy import ROWS, WIDTH, ToyHandlers, make_inputs, make_stages, reference
from tests.zoo import ZOO

SPEC = MessageSpec((ROWS, WIDTH), torch.float32)
SMALL = MessageSpec((2,), torch.float32)


def train(rank: int, name: str, stamped: bool) -> list[list[float]]:
    """Two iterations of a zoo plan with the toy model; the gradients of this rank's stages."""
    problem, plan = ZOO[name]()
    programs = lower(problem, plan)
    stages = make_stages(problem.num_stages)
    store = ActivationStore(parameters=[p for s in stages for p in s.parameters()], min_bytes=1)
    handlers = ToyHandlers(problem, stages, make_inputs(problem.num_microbatches), store)
    transport = GroupTransport(rank, range(len(programs)), lambda _: SPEC, stamped=stamped)
    transport.warm_up(programs)
    assert dist.group.WORLD is not None
    connections = group_connections(dist.group.WORLD, "test")
    abort = StoreAbort(connections(), rank)
    abort.on_fault(transport.interrupt)
    turns = StoreTurns(connections, awaited_elsewhere(programs, rank), abort)
    lanes = ThreadLanes(rank, abort=abort, turns=turns)
    executor = Executor(programs[rank], handlers, transport, lanes, store, abort=abort)
    for _ in range(2):
        for stage in stages:
            stage.zero_grad()
        executor.run()
    dist.barrier()
    abort.close()
    mine = [p for s in problem.stages_on(rank) for p in stages[s].parameters()]
    return [p.grad.flatten().tolist() for p in mine if p.grad is not None]


@pytest.mark.parametrize(
    ("name", "stamped"),
    [
        ("two-ranks-two-chunks", True),
        ("v-shape", True),
        ("adversary-2x2", False),
        ("offload-all-shared-switch", False),
        ("offload-host-limit", True),
    ],
)
def test_gradients_over_gloo(name: str, stamped: bool) -> None:
    problem, _ = ZOO[name]()
    _, grads = reference(problem)
    of_stage = iter(grads)
    wanted = [
        [next(of_stage).flatten().tolist() for _ in stage.parameters()]
        for stage in make_stages(problem.num_stages)
    ]
    results = run_ranks(problem.num_devices, train, name, stamped)
    for device, found in enumerate(results):
        assert found == [grad for s in problem.stages_on(device) for grad in wanted[s]], found


def cross(rank: int) -> str:
    """Sends one microbatch in the place of another."""
    transport = GroupTransport(rank, (0, 1), lambda _: SMALL, stamped=True)
    wanted, sent = Message("F", 0, 0, 0, 1), Message("F", 0, 1, 0, 1)
    if rank == 0:
        # The tag of the right message with the stamp of the wrong one.
        for part in (torch.tensor([0, 0, 1, 0]), torch.zeros(2)):
            transport._isend(part, 1, wanted).wait()
        return str(sent)
    transport.post_receive(wanted)
    transport.receive(wanted)
    return "nothing noticed"


def test_a_crossed_message_is_noticed() -> None:
    assert run_ranks(2, cross)[1] == "WrongMessage: waited for F(0,0) and got F(0,1)"


def wrong_shape(rank: int) -> str:
    transport = GroupTransport(rank, (0, 1), lambda _: SMALL)
    transport.send(Message("F", 0, 0, 0, 1), torch.zeros(3))
    return "sent"


def test_a_shape_that_the_receiver_does_not_expect_is_refused() -> None:
    (result,) = run_ranks(1, wrong_shape)
    assert "F(0,0) 0->1: the output is (3,)" in result
    assert "make all microbatches one shape" in result


def stall(rank: int) -> str:
    transport = GroupTransport(rank, (0, 1), lambda _: SMALL, stall_s=0.3)
    message = Message("F", 0, 0, 0, 1)
    if rank == 0:
        time.sleep(2.0)
        return "slept"
    transport.post_receive(message)
    transport.receive(message)
    return "received"


def test_a_stall_names_the_message_and_the_time() -> None:
    assert run_ranks(2, stall)[1].startswith("PeerLost: receive of F(0,0) 0->1 failed after 0.")


def interrupted(rank: int) -> str:
    transport = GroupTransport(rank, (0, 1), lambda _: SMALL)
    message = Message("B", 1, 0, 1, 0)
    if rank == 1:
        time.sleep(3.0)
        return "slept"
    transport.post_receive(message)
    threading.Timer(0.3, transport.interrupt).start()
    try:
        transport.receive(message)
    except PeerLost:
        return "interrupted"
    return "received"


def test_a_blocked_receive_can_be_interrupted() -> None:
    assert run_ranks(2, interrupted)[0] == "interrupted"


def fail_in_lane(rank: int) -> str:
    """A copy fails on rank 1 while all others wait for messages."""
    problem, plan = ZOO["offload-all-full-duplex"]()
    programs = lower(problem, plan)
    stages = make_stages(problem.num_stages)
    store = ActivationStore(min_bytes=1)
    if rank == 1:
        store.pool.budget_bytes = 10
    handlers = ToyHandlers(problem, stages, make_inputs(problem.num_microbatches), store)
    transport = GroupTransport(rank, range(4), lambda _: SPEC)
    transport.warm_up(programs)
    assert dist.group.WORLD is not None
    abort = StoreAbort(group_connections(dist.group.WORLD, "test")(), rank)
    abort.on_fault(transport.interrupt)
    lanes = ThreadLanes(rank, abort=abort)
    try:
        Executor(programs[rank], handlers, transport, lanes, store, abort=abort).run()
    except RuntimeFault as fault:
        return f"{fault.rank} {fault.op} {fault}"
    return "ended"


def test_a_failing_copy_ends_all_ranks_by_name() -> None:
    for result in run_ranks(4, fail_in_lane):
        assert result.startswith("1 O(1,0) rank 1 failed at op O(1,0), transfer 1 of its offload")
        assert "the budget is 10" in result


@pytest.mark.parametrize("name", sorted(ZOO))
def test_pairs_are_warmed_up_in_one_order(name: str) -> None:
    problem, plan = ZOO[name]()
    pairs = used_pairs(lower(problem, plan))
    assert pairs == sorted(set(pairs))
    hops = {
        tuple(sorted((problem.device_of(s), problem.device_of(s + 1))))
        for s in range(problem.num_stages - 1)
    }
    assert set(pairs) == {hop for hop in hops if hop[0] != hop[1]}


def test_tags_are_of_one_message_only() -> None:
    from megatron_optpipe.runtime.group_transport import _tag

    messages = [
        Message(kind, stage, microbatch, 0, 1)
        for kind in "FB"
        for stage in (0, 1, 63, 255)
        for microbatch in (0, 1, 511, 65535)
    ]
    assert len({_tag(m) for m in messages}) == len(messages)
    assert max(_tag(m) for m in messages) < 2**29
    assert Op("F", 0, 0) == messages[0].producer
