"""List scheduler: who may take memory so that nobody is ever stuck for lack of it.

An op takes memory only if afterwards, for every microbatch under way, the memory that younger
microbatches cannot be made to give back leaves room for it to finish alone (Dijkstra's banker;
microbatches run in order, so the oldest goes first).
"""

from __future__ import annotations

from megatron_optpipe.planner.store import (
    ALONE,
    DEVICE,
    EARLY,
    EARLY_ALL,
    EARLY_BYTES,
    FIRST,
    MEMORY,
    NEWEST,
    NEXT_X,
    NEXT_Y,
    NUM_MICROBATCHES,
    OWNED,
    PIN,
    PINNED,
    PINNED_ALL,
    RETURN_BYTES,
    UNEVEN,
    Z_TAKES,
    Store,
)


def safe(a: Store, d: int, j: int, adds: int, early: int) -> bool:
    """Whether microbatch ``j`` may take ``adds`` bytes of device ``d`` beyond recall (see above).

    ``early`` of them are for an op after the next one of ``j`` on this device.
    """
    limit = a[a[MEMORY] + d] - a[a[ALONE] + d]
    if a[a[PINNED_ALL] + d] + a[a[EARLY_ALL] + d] + adds + early <= limit:
        return True
    m = a[NUM_MICROBATCHES]
    oldest = a[a[NEXT_Y] + a[a[OWNED] + a[a[FIRST] + d]]]
    if j <= oldest and early == 0:
        return True  # what the oldest holds stands only in the way of older ones: there are none
    complete = a[a[NEXT_X] + a[a[OWNED] + a[a[FIRST] + d + 1] - 1]]  # below: all X done
    younger = 0
    for i in range(max(a[a[NEWEST] + d], j), oldest - 1, -1):
        pinned = a[a[PINNED] + d * m + i]
        ahead = a[a[EARLY_BYTES] + d * m + i]
        if i == j:
            pinned += adds
            ahead += early
        # Two bounds on what microbatch i needs to finish alone; either will do.
        if (i < j or (i == j and early > 0)) and younger + ahead > limit:
            returns = pinned + a[a[RETURN_BYTES] + d]
            if i >= complete or younger + returns > a[a[MEMORY] + d]:
                return False
        younger += pinned
    return True


def repin(a: Store, stage: int, j: int, pin: int, early: int) -> None:
    """Set what an activation holds beyond recall, and what of it was reloaded ahead of need."""
    m, d = a[NUM_MICROBATCHES], a[a[DEVICE] + stage]
    i, k = stage * m + j, d * m + j
    a[a[PINNED] + k] += pin - a[a[PIN] + i]
    a[a[PINNED_ALL] + d] += pin - a[a[PIN] + i]
    a[a[PIN] + i] = pin
    a[a[EARLY_BYTES] + k] += early - a[a[EARLY] + i]
    a[a[EARLY_ALL] + d] += early - a[a[EARLY] + i]
    a[a[EARLY] + i] = early
    if j > a[a[NEWEST] + d]:
        a[a[NEWEST] + d] = j


def next_on_device(a: Store, stage: int, j: int) -> bool:
    """Whether Y(stage, j) is the next Y of microbatch j on its device."""
    d = a[a[DEVICE] + stage]
    at = a[a[FIRST] + d + 1] - 1
    while a[a[OWNED] + at] != stage:
        if a[a[NEXT_Y] + a[a[OWNED] + at]] <= j:
            return False
        at -= 1
    return True


def z_early(a: Store, stage: int, j: int) -> int:
    """Bytes that Z(stage, j), coming first, takes before the X of a lower stage of its device."""
    d = a[a[DEVICE] + stage]
    if not a[a[UNEVEN] + d]:
        return 0
    at = a[a[FIRST] + d]
    while a[a[OWNED] + at] != stage:
        if a[a[NEXT_X] + a[a[OWNED] + at]] <= j:
            return a[a[Z_TAKES] + stage]
        at += 1
    return 0
