"""A second judge of plans, written from the contract alone and shared with nobody.

It looks at instants: for every moment at which anything starts or ends it recounts what runs and
what is held, with exact fractions and no tolerance tricks beyond rounding times to 1e-6 ms.
"""

from __future__ import annotations

from fractions import Fraction

from megatron_optpipe.core import Op, Plan, Problem

TICK = Fraction(1, 10**6)


def _ticks(ms: float) -> int:
    return round(Fraction(ms) / TICK)


def truly_valid(problem: Problem, plan: Plan) -> bool:
    """Whether the plan obeys rules 1 to 9, times rounded to the contract's 1e-6 ms."""
    if plan.problem_sha256 != problem.digest or len(plan.devices) != problem.num_devices:
        return False
    when: dict[Op, tuple[int, int]] = {}
    for index, device in enumerate(plan.devices):
        for lane, allowed in (
            (device.compute, "FBW"),
            (device.offload, "O"),
            (device.reload, "R"),
        ):
            previous = None
            for op, at in lane:
                inside = op.stage < problem.num_stages and op.microbatch < problem.num_microbatches
                if op.kind not in allowed or not inside or op in when:
                    return False
                if problem.stage_device[op.stage] != index:
                    return False
                if op.kind in "OR" and not problem.can_offload(op.stage):
                    return False
                begin = _ticks(at)
                if previous is not None and begin < previous:
                    return False
                previous = begin
                when[op] = (begin, begin + _ticks(problem.duration_ms(op)))
    return (
        _complete(problem, when)
        and _ordered(problem, plan, when)
        and _exclusive(problem, when)
        and _fits(problem, when)
        and min(begin for op, (begin, _) in when.items() if op.kind in "FBW") in (-1, 0, 1)
        and abs(
            _ticks(plan.makespan_ms) - max(end for op, (_, end) in when.items() if op.kind in "FBW")
        )
        <= 1
    )


def _complete(problem: Problem, when: dict[Op, tuple[int, int]]) -> bool:
    for s in range(problem.num_stages):
        for j in range(problem.num_microbatches):
            if any(Op(kind, s, j) not in when for kind in "FBW"):
                return False
            if (Op("O", s, j) in when) != (Op("R", s, j) in when):
                return False
    return True


def _ordered(problem: Problem, plan: Plan, when: dict[Op, tuple[int, int]]) -> bool:
    for op, (begin, _) in when.items():
        kind, s, j = op
        here = problem.stage_device[s]
        needs = []
        if kind == "F" and s > 0:
            needs.append((Op("F", s - 1, j), problem.stage_device[s - 1]))
        if kind == "B":
            needs.append((Op("F", s, j), here))
            if s + 1 < problem.num_stages:
                needs.append((Op("B", s + 1, j), problem.stage_device[s + 1]))
            if Op("R", s, j) in when:
                needs.append((Op("R", s, j), here))
        if kind == "W":
            needs.append((Op("B", s, j), here))
        if kind == "O":
            needs.append((Op("F", s, j), here))
        if kind == "R":
            needs.append((Op("O", s, j), here))
        for need, where in needs:
            if begin < when[need][1] + _ticks(problem.hop_ms(where, here)) - 1:
                return False
    for device in plan.devices:
        place = {op: at for at, (op, _) in enumerate(device.compute)}
        for op, at in place.items():
            after = Op(op.kind, op.stage, op.microbatch + 1)
            if place.get(after, at + 1) < at:
                return False
    return True


def _exclusive(problem: Problem, when: dict[Op, tuple[int, int]]) -> bool:
    by_resource: dict[object, list[tuple[int, int]]] = {}
    for op, span in when.items():
        who: object = problem.stage_device[op.stage]
        if op.kind in "OR":
            device = problem.devices[problem.stage_device[op.stage]]
            who = device.d2h if op.kind == "O" else device.h2d
        by_resource.setdefault(who, []).append(span)
    for spans in by_resource.values():
        spans.sort()
        if any(second[0] < first[1] - 1 for first, second in zip(spans, spans[1:])):
            return False
    return True


def _fits(problem: Problem, when: dict[Op, tuple[int, int]]) -> bool:
    instants = sorted({begin for begin, _ in when.values()})
    for now in instants:
        held = [0] * problem.num_devices
        on_host = 0
        for op, (begin, end) in when.items():
            stage, device = problem.stages[op.stage], problem.stage_device[op.stage]
            started, ended = begin <= now, end <= now + 1
            if op.kind == "F" and started:
                held[device] += stage.activation_bytes
            elif op.kind == "B":
                frees = stage.backward_frees_bytes
                held[device] -= frees if (ended if frees >= 0 else started) else 0
            elif op.kind == "W" and ended:
                held[device] -= stage.activation_bytes - stage.backward_frees_bytes
            elif op.kind == "O":
                held[device] -= stage.offload_bytes if ended else 0
                on_host += stage.wire_bytes if started else 0
            elif op.kind == "R":
                held[device] += stage.offload_bytes if started else 0
                on_host -= stage.wire_bytes if ended else 0
        if any(h > d.memory_bytes for h, d in zip(held, problem.devices)):
            return False
        if problem.host_memory_bytes is not None and on_host > problem.host_memory_bytes:
            return False
    return True
