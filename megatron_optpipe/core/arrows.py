"""The waits between lanes that a plan implies: what an op needs beyond its own lane's order.

A runtime follows the order of a plan, not its clock (the contract, "Executing a plan"). Data and
link waits are the arrows of rule 6. Memory waits keep rule 7 without a clock: if every allocation
waits for enough of the releases that the plan has before it, then at any moment of a real run the
latest allocation (in plan order) that has happened bounds what is held, and so the limit holds
however slow a transfer is. ``cross_lane_waits`` picks the fewest such releases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from megatron_optpipe.core.op import TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import DevicePlan, Plan
from megatron_optpipe.core.problem import Problem


def cross_lane_waits(problem: Problem, plan: Plan) -> dict[Op, tuple[Op, ...]]:
    """For each op, the ops of other lanes (or devices, over links and host memory) whose end it
    must wait for. Messages between devices are not in it; they belong to the program."""
    waits: dict[Op, list[Op]] = defaultdict(list)
    for index, device in enumerate(plan.devices):
        for op, _ in device.offload:
            waits[op].append(Op("F", op.stage, op.microbatch))
        for op, _ in device.reload:
            waits[op].append(Op("O", op.stage, op.microbatch))
            waits[Op("B", op.stage, op.microbatch)].append(op)
        _add_memory_waits(problem, index, device, waits)
    _add_link_waits(problem, plan, waits)
    if problem.host_memory_bytes is not None:
        _add_host_waits(problem, plan, waits)
    return {op: tuple(dict.fromkeys(needs)) for op, needs in waits.items()}


@dataclass(slots=True)
class _Releases:
    """The releases of one lane in its order: ends, and bytes released up to each."""

    ops: list[Op] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    total_bytes: list[int] = field(default_factory=lambda: [0])

    def add(self, op: Op, end_ms: float, given_bytes: int) -> None:
        self.ops.append(op)
        self.ends_ms.append(end_ms)
        self.total_bytes.append(self.total_bytes[-1] + given_bytes)

    def count_by(self, time_ms: float) -> int:
        """How many have ended by ``time_ms``."""
        return bisect_right(self.ends_ms, time_ms + TIME_TOLERANCE_MS)

    def fewest(self, at_least_bytes: int, at_most: int) -> int:
        """The shortest run of releases, of ``at_most``, that gives ``at_least_bytes``."""
        count = 0
        while count < at_most and self.total_bytes[count] < at_least_bytes:
            count += 1
        return count


def _add_memory_waits(
    problem: Problem, index: int, device: DevicePlan, waits: dict[Op, list[Op]]
) -> None:
    """Rule 7 for one device, allocations in planned order."""
    compute, offload = _Releases(), _Releases()
    allocations: list[tuple[float, int, Op, int]] = []  # time, compute position, op, bytes taken
    position: dict[Op, int] = {}
    for lane, releases in ((device.compute, compute), (device.offload, offload)):
        for op, at in lane:
            taken, given = problem.memory_change(op)
            if lane is device.compute:
                position[op] = len(releases.ops)
            if given:
                releases.add(op, at + problem.duration_ms(op), -given)
            if taken:
                allocations.append((at, 0, op, taken))
    for op, at in device.reload:
        allocations.append((at, 1, op, problem.memory_change(op).at_start_bytes))
    allocations.sort(key=lambda entry: entry[:2])
    limit = problem.devices[index].memory_bytes
    taken_total = 0
    # What each lane has waited for so far: a lane's later ops have it for nothing.
    seen = {"compute": [0, 0], "reload": [0, 0]}  # [compute releases, offload releases]
    for at, _, op, taken in allocations:
        taken_total += taken
        needed = taken_total - limit
        on_reload_lane = op.kind == "R"
        have = seen["reload" if on_reload_lane else "compute"]
        if not on_reload_lane:
            have[0] = max(have[0], position[op])
        by_compute = max(compute.count_by(at), have[0])
        by_offload = max(offload.count_by(at), have[1])
        own = compute.total_bytes[by_compute]
        use_offload = max(have[1], offload.fewest(needed - own, by_offload))
        freed = offload.total_bytes[use_offload]
        use_compute = max(have[0], compute.fewest(needed - freed, by_compute))
        if use_offload > have[1]:
            waits[op].append(offload.ops[use_offload - 1])
        if use_compute > have[0] and on_reload_lane:
            waits[op].append(compute.ops[use_compute - 1])
        have[0], have[1] = use_compute, use_offload


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
