"""Small changes to the keys and habits behind a schedule, for local search."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.planner.families import Family
from megatron_optpipe.planner.flat import NO_LIMIT
from megatron_optpipe.planner.listsched import Keys, Rules

_KINDS = ((0,), (1,), (2,), (2,), (0, 1), (0, 1, 2))


class Point(NamedTuple):
    """Where the search stands: everything that the list scheduler is told."""

    keys: Keys
    rules: Rules


def points_of(plan: Plan, family: Family, tick_ms: float) -> list[Point]:
    """Ways to have the list scheduler follow a plan: its starts are the keys of its ops."""
    flat, m = family.flat, family.flat.num_microbatches
    keys = {kind: np.zeros(flat.num_stages * m, np.int64) for kind in "FBW"}
    leave = np.zeros(flat.num_stages * m, np.int64)
    for device in plan.devices:
        for op, start_ms in device.compute:
            keys[op.kind][op.stage * m + op.microbatch] = round(start_ms / tick_ms)
        for op, _ in device.offload:
            leave[op.stage * m + op.microbatch] = 1
    leave *= family.may_leave[family.stage]
    followed = Keys(keys["F"], keys["B"], keys["W"], leave, np.full(flat.num_stages, m, np.int64))
    return [
        Point(followed, Rules(patience=patience, slack=slack))
        for patience in (0, 1024)
        for slack in (0, family.unit, NO_LIMIT)
    ]


def neighbour(point: Point, family: Family, dice: random.Random) -> Point:
    """A copy of ``point`` with one or two changes."""
    for _ in range(1 if dice.random() < 0.7 else 2):
        draw = dice.random()
        if draw < 0.12:
            point = Point(point.keys, _other_habit(point.rules, family.unit, dice))
        elif draw > 0.85:
            point = Point(_other_cap(point.keys, family, dice), point.rules)
        else:
            offload = draw < 0.2 and family.flat.num_links > 0
            point = Point(_other_keys(point.keys, family, dice, offload), point.rules)
    return point


def _other_habit(rules: Rules, unit: int, dice: random.Random) -> Rules:
    name = dice.choice(Rules._fields)
    if name == "patience":
        value = dice.choice((0, 200, 500, 800, 1024))
    elif name == "water":
        value = dice.choice((0, 0, 300, 600, 900))
    elif name == "slack":
        value = dice.choice((0, unit // 2, unit, 3 * unit, NO_LIMIT))
    else:
        value = int(getattr(rules, name) + dice.gauss(0, 0.3) * unit)
    return rules._replace(**{name: value})


def _other_cap(keys: Keys, family: Family, dice: random.Random) -> Keys:
    """Let more or fewer forwards of a stage, some stages or a chunk be ahead."""
    stages, draw = family.flat.num_stages, dice.random()
    ahead = keys.ahead.copy()
    at, step = dice.randrange(stages), dice.choice((-1, 1))
    if draw < 0.4:
        ahead[at] += step
    elif draw < 0.7:
        ahead[at : at + dice.choice((2, 4, family.flat.num_devices))] += step
    else:
        ahead[family.chunk_of_stage == dice.randrange(family.chunks)] += step
    return keys._replace(ahead=np.clip(ahead, 1, family.flat.num_microbatches))


def _other_keys(keys: Keys, family: Family, dice: random.Random, offload: bool) -> Keys:
    """Move some ops earlier or later, or change whether their activations may leave."""
    flat, m = family.flat, family.flat.num_microbatches
    first = dice.randrange(m)
    many = dice.choice((1, 1, 2, 4, max(1, m // 4), max(1, m // 2), m))
    chosen = (family.j >= first) & (family.j < first + many)
    draw = dice.random()
    if draw < 0.2:
        chosen &= family.chunk == dice.randrange(family.chunks)
    elif draw < 0.5:
        device = dice.randrange(flat.num_devices)
        chosen &= np.asarray(flat.device)[family.stage] == device
    elif draw < 0.7:
        chosen &= family.stage == dice.randrange(flat.num_stages)
    elif draw < 0.85:
        at = dice.randrange(flat.num_stages)
        chosen &= (family.stage >= at) & (family.stage < at + dice.choice((2, 4, flat.num_devices)))
    if offload:
        leave = keys.may_leave.copy()
        leave[chosen] = dice.choice((0, 1)) * family.may_leave[family.stage[chosen]]
        return keys._replace(may_leave=leave)
    shift = int(dice.choice((-1, 1)) * family.unit * math.exp(dice.uniform(-3, 1)))
    parts = list(keys)
    for kind in dice.choice(_KINDS):
        parts[kind] = parts[kind].copy()
        parts[kind][chosen] += shift
    return Keys(*parts)
