"""The waits between lanes that a plan implies: what an op needs beyond its own lane's order.

A runtime follows the order of a plan, not its clock (the contract, "Executing a plan"). Data and
link waits are the arrows of rule 6; ``memory_waits`` keeps rule 7 without a clock.
"""

from __future__ import annotations

from collections import defaultdict

from megatron_optpipe.core.memory_waits import memory_waits
from megatron_optpipe.core.op import TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem


def cross_lane_waits(problem: Problem, plan: Plan) -> dict[Op, tuple[Op, ...]]:
    """For each op, the ops of other lanes (or devices, over links and host memory) whose end it
    must wait for. Messages between devices are not in it; they belong to the program."""
    waits: dict[Op, list[Op]] = defaultdict(list)
    for device in plan.devices:
        for op, _ in device.offload:
            waits[op].append(Op("F", op.stage, op.microbatch))
        for op, _ in device.reload:
            waits[op].append(Op("O", op.stage, op.microbatch))
            waits[Op("B", op.stage, op.microbatch)].append(op)
    _add_link_waits(problem, plan, waits)
    if problem.host_memory_bytes is not None:
        _add_host_waits(problem, plan, waits)
    for index, device in enumerate(plan.devices):
        for op, needs in memory_waits(problem, index, device, waits).items():
            waits[op] += needs
    return {op: tuple(dict.fromkeys(needs)) for op, needs in waits.items()}


def _add_link_waits(problem: Problem, plan: Plan, waits: dict[Op, list[Op]]) -> None:
    """Rule 6: transfers of a shared link take turns in the order of their planned starts."""
    on_link: dict[str, list[tuple[float, float, int, int, Op]]] = defaultdict(list)
    for index, device in enumerate(plan.devices):
        for lane in (device.offload, device.reload):
            for place, (op, at) in enumerate(lane):
                end = at + problem.duration_ms(op)
                on_link[problem.link_name(op)].append((at, end, index, place, op))
    for transfers in on_link.values():
        transfers.sort()
        for (*_, before), (*_, after) in zip(transfers, transfers[1:]):
            same_lane = before.kind == after.kind and (
                problem.device_of(before.stage) == problem.device_of(after.stage)
            )
            if not same_lane:
                waits[after].append(before)


def _add_host_waits(problem: Problem, plan: Plan, waits: dict[Op, list[Op]]) -> None:
    """Rule 8: an offload waits for the reloads that gave it room, the last of each device."""
    assert problem.host_memory_bytes is not None
    starts: list[tuple[float, Op]] = []
    ends: list[tuple[float, Op]] = []
    for device in plan.devices:
        starts += [(at, op) for op, at in device.offload]
        ends += [(at + problem.duration_ms(op), op) for op, at in device.reload]
    starts.sort()
    ends.sort()
    freed, used = 0, 0
    taken_total = 0
    last_of: dict[int, Op] = {}
    waited: dict[int, dict[int, Op]] = defaultdict(dict)
    for at, op in starts:
        taken_total += problem.stages[op.stage].wire_bytes
        while (
            taken_total - freed > problem.host_memory_bytes
            and used < len(ends)
            and ends[used][0] <= at + TIME_TOLERANCE_MS
        ):
            back = ends[used][1]
            freed += problem.stages[back.stage].wire_bytes
            last_of[problem.device_of(back.stage)] = back
            used += 1
        here = problem.device_of(op.stage)
        for device_index, back in last_of.items():
            if waited[here].get(device_index) != back:
                waited[here][device_index] = back
                waits[op].append(back)
