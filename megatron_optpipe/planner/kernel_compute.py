"""List scheduler: which op an idle device runs next."""

from __future__ import annotations

import heapq

from megatron_optpipe.planner.flat import NO_LIMIT
from megatron_optpipe.planner.kernel_memory import repin, safe, z_early
from megatron_optpipe.planner.kernel_transfers import reload_claim
from megatron_optpipe.planner.store import (
    AHEAD,
    ARRIVAL,
    BACK_START,
    BACK_TICKS,
    BLOCKED,
    CHOICE_KEY,
    CHOICE_KIND,
    CHOICE_READY,
    CHOICE_STAGE,
    CODE_BITS,
    COMPUTE_ENDS,
    DEVICE,
    FIRST,
    FORCED,
    HOLDS,
    HOST,
    IDLE,
    IN_FLIGHT,
    INDEX_BITS,
    KEY_X,
    KEY_Y,
    KEY_Z,
    MAY_LEAVE,
    MEMORY,
    MOVES,
    MOVES_ALL,
    NEXT_X,
    NEXT_Y,
    NEXT_Z,
    NONE,
    NUM_MICROBATCHES,
    NUM_STAGES,
    OUT_START,
    OWNED,
    PATIENCE,
    PIN,
    RELY,
    RUNNING,
    RUNNING_END,
    RUNNING_J,
    RUNNING_STAGE,
    SLACK,
    USED,
    X_AT,
    X_END,
    X_HOP,
    X_START,
    X_TAKES,
    X_TICKS,
    Y_AT,
    Y_END,
    Y_HOP,
    Y_START,
    Y_TAKES,
    Y_TICKS,
    Z_FIRST,
    Z_START,
    Z_TAKES,
    Z_TICKS,
    Store,
    X,
    Y,
    Z,
)


def y_ready(a: Store, stage: int, i: int, now: int) -> int:
    """When the next Y of a stage (op index ``i``) can start, as far as known; or NO_LIMIT."""
    ready = now
    if stage + 1 < a[NUM_STAGES]:
        before = a[a[Y_START] + i + a[NUM_MICROBATCHES]]
        if before == NONE:
            return NO_LIMIT
        ready = max(now, before + a[a[Y_TICKS] + stage + 1] + a[a[Y_HOP] + stage])
    if a[a[OUT_START] + i] != NONE:
        if a[a[BACK_START] + i] == NONE:
            return NO_LIMIT
        ready = max(ready, a[a[BACK_START] + i] + a[a[BACK_TICKS] + stage])
    return ready


def x_ready(a: Store, stage: int, j: int, now: int) -> int:
    """When the next X of a stage can start, as far as known; or NO_LIMIT."""
    if a[Z_FIRST] and a[a[NEXT_Z] + stage] <= j:
        return NO_LIMIT
    if j >= a[a[NEXT_Y] + stage] + a[a[AHEAD] + stage]:
        return NO_LIMIT
    if stage == 0:
        return now if j < a[a[NEXT_Y]] + a[IN_FLIGHT] else NO_LIMIT
    before = a[a[X_START] + (stage - 1) * a[NUM_MICROBATCHES] + j]
    if before == NONE:
        return NO_LIMIT
    return max(now, before + a[a[X_TICKS] + stage - 1] + a[a[X_HOP] + stage])


def x_fits(a: Store, d: int, stage: int, j: int, free: int, now: int) -> bool:
    """Whether device ``d`` has the memory to start X(stage, j) now."""
    i = stage * a[NUM_MICROBATCHES] + j
    takes = a[a[X_TAKES] + stage]
    if takes > free:
        return False
    if (
        a[HOST] > 0
        and takes + a[a[MOVES_ALL] + d] > free
        and takes + reload_claim(a, d, j, a[a[KEY_X] + i], now) > free
    ):
        return False
    adds = a[a[HOLDS] + stage] - a[a[PIN] + i]
    if a[RELY] and a[a[MAY_LEAVE] + i]:
        adds -= a[a[MOVES] + stage]
    return safe(a, d, j, adds, 0)


def least_key(a: Store, d: int) -> int:
    """The least key of the X and Y that a device has yet to start."""
    m, least = a[NUM_MICROBATCHES], NO_LIMIT
    for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
        stage = a[a[OWNED] + at]
        if a[a[NEXT_X] + stage] < m:
            least = min(least, a[a[KEY_X] + stage * m + a[a[NEXT_X] + stage]])
        if a[a[NEXT_Y] + stage] < m:
            least = min(least, a[a[KEY_Y] + stage * m + a[a[NEXT_Y] + stage]])
    return least


def choose(a: Store, choices: int, kind: int, stage: int, ready: int, key: int) -> int:
    """Add one choice of an idle device; the number of choices."""
    a[a[CHOICE_KIND] + choices] = kind
    a[a[CHOICE_STAGE] + choices] = stage
    a[a[CHOICE_READY] + choices] = ready
    a[a[CHOICE_KEY] + choices] = key
    return choices + 1


def start_compute(a: Store, d: int, now: int, heap: list[int]) -> bool:
    """Start the op that an idle device should run now; whether one started."""
    m = a[NUM_MICROBATCHES]
    a[a[BLOCKED] + d] = 0
    free = a[a[MEMORY] + d] - a[a[USED] + d]
    soonest, choices = NO_LIMIT, 0
    blocked_key, blocked_j = NO_LIMIT, NO_LIMIT
    latest_key = NO_LIMIT
    if a[SLACK] < NO_LIMIT:
        latest_key = least_key(a, d) + a[SLACK]
    for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
        stage = a[a[OWNED] + at]
        base = stage * m
        j = a[a[NEXT_Y] + stage]
        if j < a[a[NEXT_X] + stage]:
            ready = y_ready(a, stage, base + j, now)
            if a[a[KEY_Y] + base + j] > latest_key:
                ready = NO_LIMIT
            if ready <= now and a[a[Y_TAKES] + stage] > free:
                a[a[BLOCKED] + d] = 1
            elif ready < NO_LIMIT and a[a[Y_TAKES] + stage] <= free:
                soonest = min(soonest, ready + a[a[Y_TICKS] + stage])
                choices = choose(a, choices, Y, stage, ready, a[a[KEY_Y] + base + j])
        j = a[a[NEXT_Z] + stage]
        if j < (m if a[Z_FIRST] else a[a[NEXT_Y] + stage]):
            takes = a[a[Z_TAKES] + stage]
            fits = takes <= free and j < a[a[NEXT_Y]] + a[IN_FLIGHT]
            if fits and a[Z_FIRST]:
                fits = safe(a, d, j, takes, z_early(a, stage, j))
            elif (
                takes > free
                and j == a[a[NEXT_X] + stage]
                and (stage == 0 or a[a[X_START] + base - m + j] != NONE)
            ):
                a[a[BLOCKED] + d] = 1  # its X could follow
            if fits:
                soonest = min(soonest, now + a[a[Z_TICKS] + stage])
                choices = choose(a, choices, Z, stage, now, a[a[KEY_Z] + base + j])
        j = a[a[NEXT_X] + stage]
        if j < m:
            ready = x_ready(a, stage, j, now)
            if ready < NO_LIMIT:
                key = a[a[KEY_X] + base + j]
                if key > latest_key:
                    continue
                if x_fits(a, d, stage, j, free, now):
                    soonest = min(soonest, ready + a[a[X_TICKS] + stage])
                    choices = choose(a, choices, X, stage, ready, key)
                elif ready <= now:
                    a[a[BLOCKED] + d] = 1
                    if key < blocked_key:
                        blocked_key, blocked_j = key, j
    if choices == 0:
        return False
    # How long to wait for a better op: at most until the soonest possible end of any (Giffler and
    # Thompson); of those that start in time, the least key goes.
    horizon = now + max(0, soonest - now - 1) * a[PATIENCE] // 1024
    best, best_key = NONE, NO_LIMIT
    for c in range(choices):
        key = a[a[CHOICE_KEY] + c]
        if a[a[CHOICE_READY] + c] > horizon or (best != NONE and key >= best_key):
            continue
        if a[a[CHOICE_KIND] + c] == X and key > blocked_key:
            j = a[a[NEXT_X] + a[a[CHOICE_STAGE] + c]]
            if j >= blocked_j:
                continue  # leave the memory to the one that asked before
        best, best_key = c, key
    if best == NONE or a[a[CHOICE_READY] + best] > now:
        return False  # an arrival or a transfer's end will ask again
    begin(a, d, a[a[CHOICE_KIND] + best], a[a[CHOICE_STAGE] + best], now, heap)
    return True


def begin(a: Store, d: int, kind: int, stage: int, now: int, heap: list[int]) -> None:
    """Start the next op of ``kind`` of a stage on its idle device."""
    m = a[NUM_MICROBATCHES]
    if kind == X:
        j = a[a[NEXT_X] + stage]
        i = stage * m + j
        a[a[NEXT_X] + stage] = j + 1
        a[a[X_START] + i] = now
        end = now + a[a[X_TICKS] + stage]
        a[a[USED] + d] += a[a[X_TAKES] + stage]
        leaves = a[a[MOVES] + stage] if a[RELY] and a[a[MAY_LEAVE] + i] else 0
        repin(a, stage, j, a[a[HOLDS] + stage] - leaves, 0)
        if a[Z_FIRST]:
            for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
                above = a[a[OWNED] + at]
                if above > stage:
                    repin(a, above, j, a[a[PIN] + above * m + j], 0)
                    break
        a[a[X_AT] + j], a[a[X_END] + j] = stage, end
        if stage + 1 < a[NUM_STAGES]:
            announce(a, a[a[DEVICE] + stage + 1], end + a[a[X_HOP] + stage + 1], heap)
    elif kind == Y:
        j = a[a[NEXT_Y] + stage]
        i = stage * m + j
        a[a[NEXT_Y] + stage] = j + 1
        a[a[Y_START] + i] = now
        end = now + a[a[Y_TICKS] + stage]
        a[a[USED] + d] += a[a[Y_TAKES] + stage]
        repin(a, stage, j, 0, 0)
        at = a[a[FIRST] + d + 1] - 1
        while at >= a[a[FIRST] + d]:
            below = a[a[OWNED] + at]
            if below < stage:
                repin(a, below, j, a[a[PIN] + below * m + j], 0)
                break
            at -= 1
        a[a[Y_AT] + j], a[a[Y_END] + j] = stage, end
        if stage > 0:
            announce(a, a[a[DEVICE] + stage - 1], end + a[a[Y_HOP] + stage - 1], heap)
    else:
        j = a[a[NEXT_Z] + stage]
        i = stage * m + j
        a[a[NEXT_Z] + stage] = j + 1
        a[a[Z_START] + i] = now
        end = now + a[a[Z_TICKS] + stage]
        a[a[USED] + d] += a[a[Z_TAKES] + stage]
        if a[Z_FIRST]:
            repin(a, stage, j, a[a[Z_TAKES] + stage], z_early(a, stage, j))
    a[a[RUNNING] + d], a[a[RUNNING_STAGE] + d] = kind, stage
    a[a[RUNNING_J] + d], a[a[RUNNING_END] + d] = j, end
    a[a[FORCED] + d] = 0
    heapq.heappush(heap, (end << CODE_BITS) | (COMPUTE_ENDS << INDEX_BITS) | d)


def announce(a: Store, d: int, at: int, heap: list[int]) -> None:
    """Have device ``d`` look again at time ``at``, unless it is busy until then anyway."""
    if a[a[RUNNING] + d] == IDLE or a[a[RUNNING_END] + d] <= at:
        heapq.heappush(heap, (at << CODE_BITS) | (ARRIVAL << INDEX_BITS) | d)
