"""The independent checker: does a plan obey rules 1 to 10 of the contract?

It shares no code with the planner nor with ``timing``: it reads the start times of the plan and
tests each rule for itself, so that a mistake of the planner cannot hide in the check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_optpipe.core.errors import PlanInvalid
from megatron_optpipe.core.op import COMPUTE, TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem

_LANE_KINDS = {"compute": COMPUTE, "offload": ("O",), "reload": ("R",)}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: its number (or ``digest``), what is wrong, and where."""

    rule: str
    message: str
    op: Op | None = None
    device: int | None = None

    def __str__(self) -> str:
        name = self.rule if self.rule == "digest" else f"rule {self.rule}"
        which = f" {self.op}" if self.op is not None else ""
        where = f" on device {self.device}" if self.device is not None else ""
        return (
            f"{name}:{which}{where} {self.message}"
            if which or where
            else (f"{name}: {self.message}")
        )


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """Every violation of the contract, likely causes first; empty for a valid plan."""
    if plan.problem_sha256 != problem.digest:
        return [
            Violation(
                "digest",
                f"the plan is for problem {plan.problem_sha256[:12]}, this is "
                f"{problem.digest[:12]}; plan this problem anew",
            )
        ]
    found = list(_devices_and_ops(problem, plan))
    if found:  # times of missing or misplaced ops cannot be judged
        return found
    start = plan.starts()
    end = {op: at + problem.duration_ms(op) for op, at in start.items()}
    rules = (
        _data(problem, start, end),
        _microbatch_order(problem, plan, start),
        _one_at_a_time(plan, start, end),
        _transfers(problem, start, end),
        _links(problem, start, end),
        _memory(problem, plan, start, end),
        _host_memory(problem, start, end),
        _makespan(plan, start, end),
    )
    return [violation for rule in rules for violation in rule]


def require_valid(problem: Problem, plan: Plan) -> None:
    """Raise ``PlanInvalid`` with the first violation in one line if the plan is not valid."""
    found = check(problem, plan)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanInvalid(f"plan refused by {found[0]}{more}; make a new plan", found)


def _devices_and_ops(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Rule 1 (each op once, where it belongs) and the pairing of rule 6."""
    if len(plan.devices) != problem.num_devices:
        yield Violation(
            "1",
            f"the plan has {len(plan.devices)} devices, the problem {problem.num_devices}; "
            "plan this problem anew",
        )
        return
    count: dict[Op, int] = defaultdict(int)
    for index, device in enumerate(plan.devices):
        for lane, timed_ops in device.lanes():
            for op, _ in timed_ops:
                rule = "1" if lane == "compute" else "6"
                if op.kind not in _LANE_KINDS[lane]:
                    yield Violation(rule, f"does not belong in the {lane} lane", op, index)
                elif op.stage >= problem.num_stages or op.microbatch >= problem.num_microbatches:
                    yield Violation(
                        rule,
                        f"no such op: the problem has {problem.num_stages} stages and "
                        f"{problem.num_microbatches} microbatches",
                        op,
                        index,
                    )
                elif problem.stage_device[op.stage] != index:
                    yield Violation(
                        rule, f"belongs to device {problem.stage_device[op.stage]}", op, index
                    )
                else:
                    count[op] += 1
                    if count[op] == 2:
                        yield Violation(rule, "appears more than once", op, index)
    for stage in range(problem.num_stages):
        for microbatch in range(problem.num_microbatches):
            for kind in COMPUTE:
                op = Op(kind, stage, microbatch)
                if count[op] == 0:
                    yield Violation("1", "is missing", op, problem.stage_device[stage])
            pair = Op("O", stage, microbatch), Op("R", stage, microbatch)
            there = [op for op in pair if count[op]]
            if len(there) == 1:
                other = pair[1] if there[0] is pair[0] else pair[0]
                yield Violation(
                    "6", f"comes without {other}", there[0], problem.stage_device[stage]
                )
            if there and not problem.can_offload(stage):
                yield Violation(
                    "6",
                    f"stage {stage} cannot be offloaded: it needs offload_bytes above 0 and a "
                    "device with d2h and h2d",
                    there[0],
                    problem.stage_device[stage],
                )


def _one_at_a_time(plan: Plan, start: dict[Op, float], end: dict[Op, float]) -> Iterator[Violation]:
    """Rule 1: a device runs one compute op at a time; every lane is listed in execution order."""
    for index, device in enumerate(plan.devices):
        for lane, timed_ops in device.lanes():
            rule = "1" if lane == "compute" else "6"
            for (before, _), (after, at) in zip(timed_ops, timed_ops[1:]):
                if at < start[before] - TIME_TOLERANCE_MS:
                    yield Violation(
                        rule,
                        f"starts at {at:.6g} ms but is listed after {before}, which starts at "
                        f"{start[before]:.6g} ms; lanes are listed in execution order",
                        after,
                        index,
                    )
            by_time = sorted((at, end[op], place) for place, (op, at) in enumerate(timed_ops))
            for (_, until, first), (at, _, second) in zip(by_time, by_time[1:]):
                if at < until - TIME_TOLERANCE_MS:
                    yield Violation(
                        rule,
                        f"starts at {at:.6g} ms while {timed_ops[first].op} runs until "
                        f"{until:.6g} ms",
                        timed_ops[second].op,
                        index,
                    )


def _data(problem: Problem, start: dict[Op, float], end: dict[Op, float]) -> Iterator[Violation]:
    """Rules 2, 3 and 4: data dependencies with hops."""

    def late_enough(rule: str, op: Op, needs: Op) -> Iterator[Violation]:
        here, there = problem.stage_device[op.stage], problem.stage_device[needs.stage]
        ready = end[needs] + problem.hop_ms(there, here)
        if start[op] < ready - TIME_TOLERANCE_MS:
            hop = f" plus the hop from device {there}" if here != there else ""
            yield Violation(
                rule,
                f"starts at {start[op]:.6g} ms, but {needs} ends{hop} at {ready:.6g} ms",
                op,
                here,
            )

    last = problem.num_stages - 1
    for stage in range(problem.num_stages):
        for j in range(problem.num_microbatches):
            forward, backward = Op("F", stage, j), Op("B", stage, j)
            if stage > 0:
                yield from late_enough("2", forward, Op("F", stage - 1, j))
            yield from late_enough("3", backward, forward)
            if stage < last:
                yield from late_enough("3", backward, Op("B", stage + 1, j))
            yield from late_enough("4", Op("W", stage, j), backward)


def _microbatch_order(problem: Problem, plan: Plan, start: dict[Op, float]) -> Iterator[Violation]:
    """Rule 5: for one stage, microbatches of one kind run in order."""
    for index, device in enumerate(plan.devices):
        latest: dict[tuple[str, int], Op] = {}
        for op, at in device.compute:
            before = latest.get((op.kind, op.stage))
            if before is not None and (
                before.microbatch > op.microbatch or at < start[before] - TIME_TOLERANCE_MS
            ):
                late, early = sorted((before, op), key=lambda x: x.microbatch, reverse=True)
                yield Violation("5", f"runs before {early}", late, index)
            latest[op.kind, op.stage] = op


def _transfers(
    problem: Problem, start: dict[Op, float], end: dict[Op, float]
) -> Iterator[Violation]:
    """Rule 6: O after F, R after O, B after R."""
    for op in start:
        if op.kind != "O":
            continue
        _, stage, j = op
        chain = (Op("F", stage, j), op, Op("R", stage, j), Op("B", stage, j))
        for before, after in zip(chain, chain[1:]):
            if start[after] < end[before] - TIME_TOLERANCE_MS:
                yield Violation(
                    "6",
                    f"starts at {start[after]:.6g} ms, but {before} ends at {end[before]:.6g} ms",
                    after,
                    problem.stage_device[stage],
                )


def _links(problem: Problem, start: dict[Op, float], end: dict[Op, float]) -> Iterator[Violation]:
    """Rule 6: a link carries one transfer at a time, whoever shares it."""
    on_link: dict[str, list[Op]] = defaultdict(list)
    for op in start:
        if op.kind in ("O", "R"):
            on_link[problem.link_name(op)].append(op)
    for name, ops in on_link.items():
        ops.sort(key=lambda op: (start[op], end[op]))
        for before, after in zip(ops, ops[1:]):
            if start[after] < end[before] - TIME_TOLERANCE_MS:
                yield Violation(
                    "6",
                    f"starts at {start[after]:.6g} ms while link {name!r} still carries {before} "
                    f"until {end[before]:.6g} ms",
                    after,
                    problem.stage_device[after.stage],
                )


def _memory(
    problem: Problem, plan: Plan, start: dict[Op, float], end: dict[Op, float]
) -> Iterator[Violation]:
    """Rule 7: bytes on each device; releases come before allocations of the same time."""
    for index, device in enumerate(plan.devices):
        events: list[tuple[float, int, Op]] = []
        for _, timed_ops in device.lanes():
            for op, _ in timed_ops:
                stage = problem.stages[op.stage]
                takes = gives = 0
                if op.kind == "F":
                    takes = stage.activation_bytes
                elif op.kind == "R":
                    takes = stage.offload_bytes
                elif op.kind == "O":
                    gives = stage.offload_bytes
                elif op.kind == "B":
                    takes = max(0, -stage.backward_frees_bytes)
                    gives = max(0, stage.backward_frees_bytes)
                else:
                    gives = stage.activation_bytes - stage.backward_frees_bytes
                if takes:
                    events.append((start[op], takes, op))
                if gives:
                    events.append((end[op] - TIME_TOLERANCE_MS, -gives, op))
        held, peak, limit = 0, 0, problem.devices[index].memory_bytes
        over: Violation | None = None
        for at, change, op in sorted(events, key=lambda event: (event[0], event[1])):
            held += change
            peak = max(peak, held)
            if held > limit and over is None:
                over = Violation(
                    "7",
                    f"takes the device to {held} bytes at {at:.6g} ms, over memory_bytes = {limit}",
                    op,
                    index,
                )
        if over is not None:
            yield over
        if device.peak_bytes is not None and device.peak_bytes != peak:
            yield Violation(
                "7", f"peak_bytes = {device.peak_bytes}, but the ops reach {peak}", None, index
            )


def _host_memory(
    problem: Problem, start: dict[Op, float], end: dict[Op, float]
) -> Iterator[Violation]:
    """Rule 8: bytes that lie on the host, all devices together."""
    if problem.host_memory_bytes is None:
        return
    events: list[tuple[float, int, Op]] = []
    for op in start:
        wire = problem.stages[op.stage].wire_bytes
        if op.kind == "O":
            events.append((start[op], wire, op))
        elif op.kind == "R":
            events.append((end[op] - TIME_TOLERANCE_MS, -wire, op))
    held = 0
    for at, change, op in sorted(events, key=lambda event: (event[0], event[1])):
        held += change
        if held > problem.host_memory_bytes:
            yield Violation(
                "8",
                f"takes the host to {held} bytes at {at:.6g} ms, over host_memory_bytes = "
                f"{problem.host_memory_bytes}",
                op,
                problem.stage_device[op.stage],
            )
            return


def _makespan(plan: Plan, start: dict[Op, float], end: dict[Op, float]) -> Iterator[Violation]:
    """Rules 9 and 10: the makespan is what the ops say; no bound lies above it."""
    compute = [op for op in start if op.kind in COMPUTE]
    first = min(compute, key=lambda op: start[op])
    last = max(compute, key=lambda op: end[op])
    if abs(start[first]) > TIME_TOLERANCE_MS:
        yield Violation("9", f"is the first op but starts at {start[first]:.6g} ms, not 0", first)
    if abs(plan.makespan_ms - end[last]) > TIME_TOLERANCE_MS:
        yield Violation(
            "9",
            f"makespan_ms = {plan.makespan_ms:.6g}, but this last op ends at {end[last]:.6g} ms",
            last,
        )
    bound = plan.lower_bound_ms
    if bound is not None and bound > end[last] + TIME_TOLERANCE_MS:
        yield Violation("10", f"lower_bound_ms = {bound:.6g} is above the plan's own makespan")


def render_grid(problem: Problem, plan: Plan, violation: Violation | None = None) -> str:
    """The compute ops of every device in execution order, an arrow at the violation's cell."""
    lines = []
    for index, device in enumerate(plan.devices):
        cells = []
        for _, timed_ops in device.lanes():
            for op, _ in timed_ops:
                hit = violation is not None and violation.op == op
                cells.append(f">>{op}<<" if hit else str(op))
            cells.append("|")
        here = violation is not None and violation.device == index
        lines.append(f"{'->' if here else '  '} device {index}: {' '.join(cells[:-1])}".rstrip())
    return "\n".join(lines)
