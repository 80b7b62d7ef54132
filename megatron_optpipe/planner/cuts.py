"""Cuts: rows that every integer solution obeys and that fractional ones may not."""

from __future__ import annotations

from megatron_optpipe.planner.milp_constraints import (
    compute_by_device,
    memory_row,
    taken,
    transfers_of,
)
from megatron_optpipe.planner.milp_model import Literal
from megatron_optpipe.planner.milp_variables import Variables

MAX_TRIANGLES = 1_000
"""More than so many rows cost HiGHS more than they save (bench/reductions.py)."""


def add_cuts(v: Variables) -> None:
    """The cut families that the reductions ask for."""
    if v.reductions.triangle_cuts:
        triangle_cuts(v)
    if v.reductions.cover_cuts:
        cover_cuts(v)


def triangle_cuts(v: Variables) -> int:
    """No circles of three: P(a,b) + P(b,c) + P(c,a) <= 2 on each device, both ways round.

    All of them or, where they are too many, none. Returns how many rows were added.
    """
    triples: list[tuple[Literal, Literal, Literal]] = []
    for own in compute_by_device(v):
        for x, a in enumerate(own):
            for y in range(x + 1, len(own)):
                b = own[y]
                if v.is_kept(a) and v.is_kept(b):
                    continue
                ab = v.order(a, b)
                for c in own[y + 1 :]:
                    if v.is_kept(c) and (v.is_kept(a) or v.is_kept(b)):
                        continue
                    triple = (ab, v.order(b, c), v.order(c, a))
                    if sum(1 for literal in triple if literal.factor) >= 2:
                        triples.append(triple)
                        if 2 * len(triples) > MAX_TRIANGLES:
                            return 0
    for triple in triples:
        v.model.at_most([(literal, 1.0) for literal in triple], 2.0)
        v.model.at_most([(literal.negated(), 1.0) for literal in triple], 2.0)
    return 2 * len(triples)


def cover_cuts(v: Variables) -> int:
    """Before an F whose own and certain memory exceeds the limit, enough releases must end.

    Their number is at least that of the largest releases that together make the room; an offload
    counts while its reload has not started. Returns the number of cuts.
    """
    added = 0
    for d, own in enumerate(compute_by_device(v)):
        limit = v.problem.devices[d].memory_bytes
        outs, backs = transfers_of(v, d)
        takers = [a for a in own if taken(v, a)]
        if sum(taken(v, a) for a in takers) <= limit:
            continue
        for a in takers:
            certain = taken(v, a) + sum(
                taken(v, b) for b in takers if b != a and v.order(b, a).is_true
            )
            if certain <= limit:
                continue
            row = memory_row(v, a, own, outs, backs)
            releases = [(literal, -size) for literal, size in row if size < 0]
            returned = [v.started_by(back, a) for back in backs]
            sizes = sorted(
                (size for literal, size in releases if not literal.is_false), reverse=True
            )
            needed, room = 0, float(certain - limit)
            while room > 0 and needed < len(sizes):
                room -= sizes[needed]
                needed += 1
            if room > 0:
                v.model.impossible = True
                return added
            v.model.at_most(
                [
                    *((literal, -1.0) for literal, _ in releases),
                    *((literal, 1.0) for literal in returned),
                ],
                -float(needed),
            )
            added += 1
    return added
