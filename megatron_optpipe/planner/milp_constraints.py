"""The constraint families of the MILP, in the order of docs/milp.md."""

from __future__ import annotations

import math

from megatron_optpipe.core.op import COMPUTE, Op
from megatron_optpipe.planner.milp_model import TRUE, Literal
from megatron_optpipe.planner.milp_variables import Variables

MEMORY_UNITS = 1000.0
Weighted = tuple[Literal, float]


def add_constraints(v: Variables) -> None:
    """All families; cuts are added by ``cuts.add_cuts`` afterwards."""
    v.choose_offloads()
    data_dependencies(v)
    exclusive_compute(v)
    lifetimes(v)
    exclusive_links(v)
    memory(v)
    host_memory(v)
    makespan(v)


def data_dependencies(v: Variables) -> None:
    """(a) Rules 2 to 5, kept orders and orders forced by windows: arcs without conditions."""
    for a, b, lag in v.arcs:
        v.model.arc(v.link(a, b, (), lag))
    for arc in v.kept_arcs():
        v.model.arc(arc)


def exclusive_compute(v: Variables) -> None:
    """(b) Of two ops of one device one comes first."""
    for own in compute_by_device(v):
        for x, a in enumerate(own):
            for b in own[x + 1 :]:
                if not (v.is_kept(a) and v.is_kept(b)):
                    v.order(a, b)


def lifetimes(v: Variables) -> None:
    """(c) Where x = 1: O after F, R after O, B after R (rule 6)."""
    at = v.network.index
    for (s, j), away in v.away.items():
        f, out, back, b = (at[Op(k, s, j)] for k in "FORB")
        for first, second in ((f, out), (out, back), (back, b)):
            v.model.arc(v.link(first, second, (away,)))


def exclusive_links(v: Variables) -> None:
    """(d) Of two transfers on one link one comes first, where both take place."""
    links: dict[str, list[int]] = {}
    for i, op in enumerate(v.network.ops):
        if op.kind not in COMPUTE:
            links.setdefault(v.problem.link_name(op), []).append(i)
    for users in links.values():
        for x, a in enumerate(users):
            for b in users[x + 1 :]:
                if not (v.is_kept(a) and v.is_kept(b)):
                    v.order(a, b)


def memory(v: Variables) -> None:
    """(e) Rule 7, tested whenever something is allocated: what came before, minus what went."""
    compute = compute_by_device(v)
    for d in range(v.problem.num_devices):
        outs, backs = transfers_of(v, d)
        takers = [i for i in compute[d] if taken(v, i)]
        limit = v.problem.devices[d].memory_bytes
        unit = MEMORY_UNITS / max(1, limit)
        if _everything_fits(v, takers, limit):
            continue
        for a in [*takers, *backs]:
            if _cannot_break(v, a, compute[d], outs, backs, limit):
                continue
            row = memory_row(v, a, compute[d], outs, backs)
            room = (limit - taken(v, a)) * unit
            _at_most_where_away(v, a, [(literal, size * unit) for literal, size in row], room)


def _cannot_break(
    v: Variables, a: int, compute: list[int], outs: list[int], backs: list[int], limit: int
) -> bool:
    """Whether memory holds at ``a`` however the open orders are decided: no row, no columns."""
    most = taken(v, a)
    reload = v.network.ops[a].kind == "R"
    for b in compute:
        if b == a:
            continue
        if taken(v, b):
            # known_event of a reload against b: whether the reload starts by then
            first = v.known_event(a, b, end=False) if reload else v.known_order(a, b)
            most += 0 if first is not None and first.is_true else taken(v, b)
        if given(v, b):
            gone = v.known_event(b, a, end=True) if reload else v.known_order(b, a)
            most -= given(v, b) if gone is not None and gone.is_true else 0
    for out in outs:
        gone = v.known_event(out, a, end=True)
        most -= given(v, out) if gone is not None and gone.is_true else 0
    for back in backs:
        if back != a:
            here = v.known_order(back, a) if reload else v.known_event(back, a, end=False)
            most += 0 if here is not None and here.is_false else taken(v, back)
    return most <= limit


def host_memory(v: Variables) -> None:
    """(e') Rule 8, tested whenever an offload starts; over all devices."""
    limit = v.problem.host_memory_bytes
    if limit is None:
        return
    outs = [i for i, op in enumerate(v.network.ops) if op.kind == "O"]
    backs = [i for i, op in enumerate(v.network.ops) if op.kind == "R"]
    wire = [v.problem.stages[op.stage].wire_bytes for op in v.network.ops]
    unit = MEMORY_UNITS / max(1, limit)
    for a in outs:
        row = [(_out_before(v, out, a), wire[out] * unit) for out in outs if out != a]
        row += [
            (v.ended_before(back, a), -wire[back] * unit)
            for back in backs
            if v.network.ops[back][1:] != v.network.ops[a][1:]
        ]
        _at_most_where_away(v, a, row, (limit - wire[a]) * unit)


def _out_before(v: Variables, out: int, a: int) -> Literal:
    """Whether one offload has started when another starts."""
    if v.problem.link_name(v.network.ops[out]) == v.problem.link_name(v.network.ops[a]):
        return _and(v, v.order(out, a), v.is_away(out))
    if out < a:  # one literal a pair, so that at equal times one of the two is counted
        return v.started_by(out, a)
    return _and(v, v.started_by(a, out).negated(), v.is_away(out))


def _at_most_where_away(v: Variables, a: int, row: list[Weighted], room: float) -> None:
    """The row of an allocation, of which a transfer that does not take place asks nothing."""
    if not v.is_away(a).is_true:
        slack = max(0.0, sum(max(0.0, size) for _, size in row) - room)
        row = [*row, (v.is_away(a), slack)]
        room += slack
    v.model.at_most(row, room)


def memory_row(
    v: Variables, a: int, compute: list[int], outs: list[int], backs: list[int]
) -> list[Weighted]:
    """Bytes that others hold when op ``a`` allocates: literals weighted by what they hold."""
    row: list[Weighted] = []
    reload = v.network.ops[a].kind == "R"
    for b in compute:
        if b == a:
            continue
        if taken(v, b):
            before = v.started_by(a, b).negated() if reload else v.order(b, a)
            row.append((before, float(taken(v, b))))
        if given(v, b):
            row.append((v.ended_before(b, a), -float(given(v, b))))
    for out in outs:
        if not (reload and v.network.ops[out][1:] == v.network.ops[a][1:]):
            row.append((v.ended_before(out, a), -float(given(v, out))))
        else:
            row.append((TRUE, -float(given(v, out))))
    for back in backs:
        if back == a:
            continue
        counted = _and(v, v.order(back, a), v.is_away(back)) if reload else v.started_by(back, a)
        row.append((counted, float(taken(v, back))))
    return row


def makespan(v: Variables) -> None:
    """(f) C is no less than the end of the last W of every stage."""
    waited = {a for a, _, _ in v.arcs}
    for i, op in enumerate(v.network.ops):
        if op.kind in COMPUTE and i not in waited:
            v.model.row([(v.makespan, 1.0), (i, -1.0)], 0.0, math.inf)


def taken(v: Variables, i: int) -> int:
    """Bytes that op ``i`` allocates when it starts."""
    return v.problem.memory_change(v.network.ops[i]).at_start_bytes


def given(v: Variables, i: int) -> int:
    """Bytes that op ``i`` releases when it ends."""
    return -v.problem.memory_change(v.network.ops[i]).at_end_bytes


def compute_by_device(v: Variables) -> list[list[int]]:
    """Numbers of the compute ops of every device."""
    own: list[list[int]] = [[] for _ in v.problem.devices]
    for i, op in enumerate(v.network.ops):
        if op.kind in COMPUTE:
            own[v.network.device[i]].append(i)
    return own


def transfers_of(v: Variables, device: int) -> tuple[list[int], list[int]]:
    """Numbers of the O and of the R ops of a device."""
    own = [i for i, d in enumerate(v.network.device) if d == device]
    ops = v.network.ops
    return [i for i in own if ops[i].kind == "O"], [i for i in own if ops[i].kind == "R"]


def _everything_fits(v: Variables, takers: list[int], limit: int) -> bool:
    return sum(taken(v, i) for i in takers) <= limit


def _and(v: Variables, one: Literal, two: Literal) -> Literal:
    """A literal that is 1 where both are; it may be 1 elsewhere, where that only costs."""
    if one.is_true or two.is_false:
        return two
    if two.is_true or one.is_false:
        return one
    both = v.model.binary()
    v.model.at_most([(one, 1.0), (two, 1.0), (both, -1.0)], 1.0)
    return both
