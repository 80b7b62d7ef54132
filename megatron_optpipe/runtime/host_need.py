"""How many host buffers a program can need at once, whatever the timing."""

from __future__ import annotations

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.program import Compute, Program


def host_buffers(program: Program) -> dict[int, int]:
    """For each stage the most of its microbatches that can lie on the host at one time.

    An offload may start once what it waits for has ended, however far behind the reloads are that
    it does not wait for. So from the worst offload on no iteration needs more than this.
    """
    lanes = [
        [item.op for item in program.items if isinstance(item, Compute)],
        list(program.offload),
        list(program.reload),
    ]
    own = {op for lane in lanes for op in lane}
    place = {op: i for lane in lanes for i, op in enumerate(lane)}
    reloads_known: dict[Op, int] = {}  # at the end of an op: reloads that are known to have ended
    before_offload: dict[Op, int] = {}
    heads = [0, 0, 0]
    moved = True
    while moved:
        moved = False
        for which, lane in enumerate(lanes):
            while heads[which] < len(lane):
                op = lane[heads[which]]
                needs = [need for need in program.waits.get(op, ()) if need in own]
                if any(need not in reloads_known for need in needs):
                    break
                if heads[which]:
                    needs.append(lane[heads[which] - 1])
                known = max((reloads_known[need] for need in needs), default=0)
                if op.kind == "O":
                    before_offload[op] = known
                reloads_known[op] = place[op] + 1 if op.kind == "R" else known
                heads[which] += 1
                moved = True
    return _most(program, before_offload)


def _most(program: Program, reloads_before: dict[Op, int]) -> dict[int, int]:
    most: dict[int, int] = {}
    begun: dict[int, int] = {}
    for op in program.offload:
        begun[op.stage] = begun.get(op.stage, 0) + 1
        back = program.reload[: reloads_before.get(op, 0)]
        here = begun[op.stage] - sum(1 for r in back if r.stage == op.stage)
        most[op.stage] = max(most.get(op.stage, 0), here)
    return most
