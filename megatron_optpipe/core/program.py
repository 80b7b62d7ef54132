"""Lowering: from a plan to what each rank does, one op and one message after the other.

All compute ops and all messages of all ranks are put into ONE order that respects every wait of the
plan; a rank's program is its part of that order. Then each pair of ranks sees its messages, both
directions together, in the same order on both sides, and the first thing of the order that is not
done yet can always be done: the program ends even if sends and receives block until they meet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_optpipe.core.arrows import cross_lane_waits
from megatron_optpipe.core.deadlock import describe_cycle
from megatron_optpipe.core.errors import Deadlock
from megatron_optpipe.core.op import COMPUTE, TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem


class Message(NamedTuple):
    """The result of F or B of ``stage``, for one microbatch, from device ``src`` to ``dst``."""

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def producer(self) -> Op:
        """The op whose result this is."""
        return Op(self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.producer} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op on the compute lane."""

    op: Op

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the result of an op that has run."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of a message now; the wait for it is at the op that uses it."""

    message: Message

    def __str__(self) -> str:
        return f"receive {self.message}"


Item = Compute | Send | Recv


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does: compute and messages in order, the transfer lanes, and the waits."""

    device: int
    items: tuple[Item, ...]
    offload: tuple[Op, ...]
    reload: tuple[Op, ...]
    waits: Mapping[Op, tuple[Op, ...]]
    """Ops whose end an op must wait for, beyond its own lane's order and its message."""
    pace: Mapping[Op, Op] = field(default_factory=dict)
    """For a reload, the compute op that the plan has ended before it: handed to its lane sooner, a
    reload would be safe (``waits`` see to that), but hold memory long before its B needs it."""


def input_of(problem: Problem, op: Op) -> Op | None:
    """The op whose result an F or B takes as its input; ``None`` at the ends of the model."""
    if op.kind == "F" and op.stage > 0:
        return Op("F", op.stage - 1, op.microbatch)
    if op.kind == "B" and op.stage < problem.num_stages - 1:
        return Op("B", op.stage + 1, op.microbatch)
    return None


def output_message(problem: Problem, op: Op) -> Message | None:
    """The message that carries the result of an op, where another device needs it."""
    after = op.stage + 1 if op.kind == "F" else op.stage - 1
    if op.kind not in ("F", "B") or not 0 <= after < problem.num_stages:
        return None
    src, dst = problem.device_of(op.stage), problem.device_of(after)
    return None if src == dst else Message(op.kind, op.stage, op.microbatch, src, dst)


def lower(problem: Problem, plan: Plan, *, kinds: Sequence[str] = COMPUTE) -> tuple[Program, ...]:
    """One program a device. ``kinds=("F",)`` lowers an evaluation: forwards only, no transfers.

    The plan must have passed ``check``. Raises ``Deadlock`` if its orders cannot run.
    """
    whole = set(kinds) >= set(COMPUTE)
    waits = cross_lane_waits(problem, plan) if whole else {}
    pace = _pace(problem, plan) if whole else {}
    items: list[list[Item]] = [[] for _ in plan.devices]
    for node in _one_order(problem, plan, kinds, waits, pace):
        if isinstance(node, Message):
            items[node.src].append(Send(node))
            items[node.dst].append(Recv(node))
        elif node.kind in COMPUTE:
            items[problem.device_of(node.stage)].append(Compute(node))
    programs = []
    for index, device in enumerate(plan.devices):
        offload = tuple(op for op, _ in device.offload) if whole else ()
        reload = tuple(op for op, _ in device.reload) if whole else ()
        mine = {op for op, _ in device.compute} | set(offload) | set(reload)
        programs.append(
            Program(
                device=index,
                items=tuple(items[index]),
                offload=offload,
                reload=reload,
                waits={op: needs for op, needs in waits.items() if op in mine},
                pace={op: pace[op] for op in reload if op in pace},
            )
        )
    return tuple(programs)


def _pace(problem: Problem, plan: Plan) -> dict[Op, Op]:
    """For each reload the last compute op of its device that has ended when it starts."""
    pace: dict[Op, Op] = {}
    for device in plan.devices:
        ends_ms = [at + problem.duration_ms(op) for op, at in device.compute]
        for op, at in device.reload:
            ended = bisect_right(ends_ms, at + TIME_TOLERANCE_MS)
            if ended:
                pace[op] = device.compute[ended - 1].op
    return pace


Node = Op | Message


def _one_order(
    problem: Problem,
    plan: Plan,
    kinds: Sequence[str],
    waits: Mapping[Op, tuple[Op, ...]],
    pace: Mapping[Op, Op],
) -> list[Node]:
    """Every op and message in one order that respects lanes, data and waits; planned times decide
    among what is free (a message is timed by the end of its producer and goes first)."""
    start = {op: at for op, at in plan.starts().items() if op.kind in kinds or op.kind in "OR"}
    if not waits:
        start = {op: at for op, at in start.items() if op.kind in COMPUTE}
    after: dict[Node, list[Node]] = defaultdict(list)
    missing: dict[Node, int] = defaultdict(int)
    key: dict[Node, float] = {op: at for op, at in start.items()}  # noqa: C416

    def arrow(before: Node, then: Node) -> None:
        after[before].append(then)
        missing[then] += 1

    for device in plan.devices:
        for _, lane in device.lanes():
            kept = [op for op, _ in lane if op in start]
            for before, then in zip(kept, kept[1:]):
                arrow(before, then)
    for op in start:
        if op.kind not in COMPUTE:
            continue
        message = output_message(problem, op)
        if message is not None:
            key[message] = start[op] + problem.duration_ms(op)
            arrow(op, message)
        source = input_of(problem, op)
        if source is not None and source in start:
            sent = output_message(problem, source)
            arrow(source if sent is None else sent, op)
        if op.kind == "B" and Op("F", op.stage, op.microbatch) in start:
            arrow(Op("F", op.stage, op.microbatch), op)
        if op.kind == "W":
            arrow(Op("B", op.stage, op.microbatch), op)
    for op, needs in waits.items():
        for need in needs:
            arrow(need, op)
    for op, need in pace.items():
        arrow(need, op)
    return _sorted_by_time(key, after, missing)


def _sorted_by_time(
    key: Mapping[Node, float], after: Mapping[Node, list[Node]], missing: dict[Node, int]
) -> list[Node]:
    def rank(node: Node) -> tuple[float, int, Node]:
        return (key[node], 0 if isinstance(node, Message) else 1, node)

    free = [rank(node) for node in key if not missing[node]]
    heapq.heapify(free)
    order: list[Node] = []
    while free:
        node = heapq.heappop(free)[2]
        order.append(node)
        for then in after.get(node, ()):
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(free, rank(then))
    if len(order) < len(key):
        stuck = {node for node in key if missing[node]}
        needs: dict[Node, tuple[Node | None, str]] = {}
        for node in stuck:
            for then in after.get(node, ()):
                if then in stuck:
                    needs[then] = (node, f"needs {node}")
        raise Deadlock(describe_cycle(needs, {}))
    return order


def prove_ends(programs: Sequence[Program]) -> None:
    """Replay the programs with sends AND receives that block until they meet.

    Raises ``Deadlock`` naming who waits for whom. Passing proves that they end under any weaker
    rule too: buffered sends, or receives that are posted and waited for later.
    """
    place = [0] * len(programs)
    lanes = [lane for p in programs for lane in (p.offload, p.reload)]
    lane_place = [0] * len(lanes)
    lane_program = [p for p in programs for _ in (0, 1)]
    done: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for index, lane in enumerate(lanes):
            while lane_place[index] < len(lane):
                op = lane[lane_place[index]]
                program = lane_program[index]
                needs = [*program.waits.get(op, ()), program.pace.get(op, op)]
                if any(need not in done for need in needs if need != op):
                    break
                done.add(op)
                lane_place[index] += 1
                moved = True
        for program in programs:
            while _step(program, programs, place, done):
                moved = True
    if any(at < len(p.items) for at, p in zip(place, programs)):
        raise Deadlock(_describe(programs, place, done))


def _step(program: Program, programs: Sequence[Program], place: list[int], done: set[Op]) -> bool:
    """Do the next item of a program if it can be done; messages move both ends at once."""
    here = place[program.device]
    if here >= len(program.items):
        return False
    item = program.items[here]
    if isinstance(item, Compute):
        if any(need not in done for need in program.waits.get(item.op, ())):
            return False
        done.add(item.op)
        place[program.device] += 1
        return True
    message = item.message
    peer = message.dst if isinstance(item, Send) else message.src
    other = programs[peer]
    wanted: Item = Recv(message) if isinstance(item, Send) else Send(message)
    if place[peer] >= len(other.items) or other.items[place[peer]] != wanted:
        return False
    place[program.device] += 1
    place[peer] += 1
    return True


def _describe(programs: Sequence[Program], place: Sequence[int], done: set[Op]) -> str:
    parts = []
    for program in programs:
        if place[program.device] >= len(program.items):
            continue
        item = program.items[place[program.device]]
        if isinstance(item, Compute):
            missing = [str(n) for n in program.waits.get(item.op, ()) if n not in done]
            parts.append(f"device {program.device} at {item} needs {', '.join(missing)}")
        else:
            message = item.message
            peer = message.dst if isinstance(item, Send) else message.src
            at = place[peer]
            other = programs[peer].items
            doing = f"is at {other[at]}" if at < len(other) else "has ended"
            parts.append(
                f"device {program.device} at {item} waits for device {peer}, which {doing}"
            )
    return "deadlock: " + "; ".join(parts) + "; change the order"
