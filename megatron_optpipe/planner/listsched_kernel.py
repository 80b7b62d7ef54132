"""The list scheduler: compute order, offloads and reloads decided together, in order of time.

Plain functions on one flat store of whole numbers: run as they are on a list, or compiled by numba
on an array, with the same result (``listsched`` chooses). ``a[FIELD]`` is a scalar of the store,
``a[a[FIELD] + i]`` entry i of a column; ``store`` says what each field is.

At every moment each idle device takes, of the ops that may start, the one with the least key; each
idle link reloads what is due, or offloads what comes back last.

Nobody can be stuck for lack of memory: an op that takes memory starts only if afterwards, for every
microbatch under way, the memory that younger microbatches cannot be made to give back leaves room
for it to finish alone (Dijkstra's banker; microbatches run in order, so the oldest goes first).
"""

from __future__ import annotations

import heapq

from megatron_optpipe.planner.flat import NO_LIMIT
from megatron_optpipe.planner.store import (
    ALONE,
    ANY_MOVES,
    BACK_LINK,
    BACK_START,
    BACK_TICKS,
    BLOCKED,
    DEVICE,
    DEVICE_DUE,
    EARLY,
    EARLY_ALL,
    EARLY_BYTES,
    FIRST,
    FORCED,
    HOLDS,
    HOST,
    HOST_BYTES,
    IN_FLIGHT,
    KEY_X,
    KEY_Y,
    KEY_Z,
    LEAVE_MARGIN,
    LINK_DUE,
    LINK_J,
    LINK_KIND,
    LINK_STAGE,
    LINK_WAKE,
    MAY_LEAVE,
    MEMORY,
    MOVES,
    NEWEST,
    NEXT_X,
    NEXT_Y,
    NEXT_Z,
    NUM_DEVICES,
    NUM_LINKS,
    NUM_MICROBATCHES,
    NUM_STAGES,
    OUT_LINK,
    OUT_START,
    OUT_TICKS,
    OWNED,
    PATIENCE,
    PIN,
    PINNED,
    PINNED_ALL,
    RELOAD_LEAD,
    RELOAD_RANK,
    RELY,
    RUNNING,
    RUNNING_END,
    RUNNING_J,
    RUNNING_STAGE,
    USED,
    WATER,
    WIRE,
    X_AT,
    X_END,
    X_GIVES,
    X_HOP,
    X_PATH,
    X_START,
    X_TAKES,
    X_TICKS,
    Y_AT,
    Y_END,
    Y_GIVES,
    Y_HOP,
    Y_PATH,
    Y_START,
    Y_TAKES,
    Y_TICKS,
    Z_FIRST,
    Z_GIVES,
    Z_START,
    Z_TAKES,
    Z_TICKS,
    Store,
)

NONE = -1
IDLE, X, Y, Z = 0, 1, 2, 3
OUT, BACK = 1, 2
COMPUTE_ENDS, ARRIVAL, TRANSFER_ENDS, WAKE = 0, 1, 2, 3
CODE_BITS = 20
INDEX_BITS = 16


def reset(a: Store) -> None:
    """Empty the state."""
    m = a[NUM_MICROBATCHES]
    for i in range(a[NUM_STAGES] * m):
        a[a[X_START] + i] = a[a[Y_START] + i] = a[a[Z_START] + i] = a[a[OUT_START] + i] = a[a[BACK_START] + i] = NONE
        a[a[PIN] + i] = a[a[EARLY] + i] = 0
    for i in range(a[NUM_STAGES]):
        a[a[NEXT_X] + i] = a[a[NEXT_Y] + i] = a[a[NEXT_Z] + i] = 0
    for d in range(a[NUM_DEVICES]):
        a[a[RUNNING] + d] = IDLE
        a[a[USED] + d] = a[a[PINNED_ALL] + d] = a[a[EARLY_ALL] + d] = 0
        a[a[NEWEST] + d] = NONE
        a[a[BLOCKED] + d] = a[a[FORCED] + d] = 0
        a[a[DEVICE_DUE] + d] = 1
        for j in range(m):
            a[a[PINNED] + d * m + j] = a[a[EARLY_BYTES] + d * m + j] = 0
    for link in range(a[NUM_LINKS]):
        a[a[LINK_KIND] + link] = IDLE
        a[a[LINK_DUE] + link] = 0
        a[a[LINK_WAKE] + link] = NO_LIMIT
    for j in range(m):
        a[a[X_AT] + j] = a[a[Y_AT] + j] = NONE
        a[a[X_END] + j] = a[a[Y_END] + j] = 0
    a[HOST] = 0


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
    younger = 0
    for i in range(max(a[a[NEWEST] + d], j), oldest - 1, -1):
        if i == j:
            if early > 0 and younger + a[a[EARLY_BYTES] + d * m + i] + early > limit:
                return False
            younger += adds
        elif i < j and younger + a[a[EARLY_BYTES] + d * m + i] > limit:
            return False
        younger += a[a[PINNED] + d * m + i]
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


def y_ready_estimate(a: Store, stage: int, j: int) -> int:
    """Earliest time at which Y(stage, j) can be ready, from how far the microbatch is."""
    last = a[NUM_STAGES] - 1
    at = a[a[Y_AT] + j]
    if at >= 0:
        return a[a[Y_END] + j] - a[a[Y_TICKS] + at] - a[a[Y_PATH] + at] + a[a[Y_PATH] + stage]
    at = a[a[X_AT] + j]
    turn = a[a[X_END] + j] + a[a[X_PATH] + last] - a[a[X_PATH] + at] - a[a[X_TICKS] + at]
    if at < last:
        turn += a[a[X_TICKS] + last]
    return turn + a[a[Y_PATH] + stage]


def leave(a: Store, link: int, now: int) -> int:
    """The op index (stage * m + j) to offload next on an idle link, or NONE."""
    m = a[NUM_MICROBATCHES]
    best, best_blocked, best_key = NONE, 0, 0
    for d in range(a[NUM_DEVICES]):
        if a[a[OUT_LINK] + d] != link:
            continue
        short = a[a[BLOCKED] + d]
        if not short and a[a[USED] + d] * 1024 <= a[a[MEMORY] + d] * a[WATER]:
            continue
        for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
            stage = a[a[OWNED] + at]
            if a[a[MOVES] + stage] == 0 or a[HOST] + a[a[WIRE] + stage] > a[HOST_BYTES]:
                continue
            j = a[a[NEXT_X] + stage] - 1
            if a[a[RUNNING] + d] == X and a[a[RUNNING_STAGE] + d] == stage:
                j -= 1
            while j >= a[a[NEXT_Y] + stage]:
                i = stage * m + j
                if a[a[OUT_START] + i] == NONE and a[a[MAY_LEAVE] + i]:
                    break
                j -= 1
            if j < a[a[NEXT_Y] + stage]:
                continue
            i = stage * m + j
            away = y_ready_estimate(a, stage, j) - now
            least = a[a[OUT_TICKS] + stage] + a[a[BACK_TICKS] + stage] + a[LEAVE_MARGIN]
            if away < least and not a[a[FORCED] + d]:
                continue
            key = a[a[KEY_Y] + i]
            if best == NONE or short > best_blocked or (short == best_blocked and key > best_key):
                best, best_blocked, best_key = i, short, key
    return best


def come_back(
    a: Store, link: int, now: int, heap: list[int]
) -> int:
    """The op index to reload next on an idle link, or NONE; asks to be woken when one is due."""
    m = a[NUM_MICROBATCHES]
    best, best_key, wake = NONE, 0, NO_LIMIT
    for d in range(a[NUM_DEVICES]):
        if a[a[BACK_LINK] + d] != link:
            continue
        for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
            stage = a[a[OWNED] + at]
            i = waiting_outside(a, stage)
            if i == NONE:
                continue
            j = i - stage * m
            left = a[a[OUT_START] + i] + a[a[OUT_TICKS] + stage]
            due = y_ready_estimate(a, stage, j) - a[a[BACK_TICKS] + stage] - a[RELOAD_LEAD]
            if due < left:
                due = left
            if due > now and not (a[a[FORCED] + d] and left <= now):
                wake = min(wake, due)
                continue
            adds = a[a[MOVES] + stage]
            if a[a[USED] + d] + adds > a[a[MEMORY] + d]:
                a[a[BLOCKED] + d] = 1
                a[a[LINK_DUE] + a[a[OUT_LINK] + d]] = 1
                continue
            early = 0 if next_on_device(a, stage, j) else adds
            if not safe(a, d, j, adds, early):
                continue
            if best == NONE or a[a[KEY_Y] + i] < best_key:
                best, best_key = i, a[a[KEY_Y] + i]
    if best == NONE and wake < a[a[LINK_WAKE] + link]:
        a[a[LINK_WAKE] + link] = wake
        heapq.heappush(heap, (wake << CODE_BITS) | (WAKE << INDEX_BITS) | link)
    return best


def waiting_outside(a: Store, stage: int) -> int:
    """The oldest activation of a stage that left and has not started to come back, or NONE."""
    if a[a[MOVES] + stage] == 0:
        return NONE
    m = a[NUM_MICROBATCHES]
    for j in range(a[a[NEXT_Y] + stage], a[a[NEXT_X] + stage]):
        i = stage * m + j
        if a[a[OUT_START] + i] != NONE and a[a[BACK_START] + i] == NONE:
            return i
    return NONE


def next_on_device(a: Store, stage: int, j: int) -> bool:
    """Whether Y(stage, j) is the next Y of microbatch j on its device."""
    d = a[a[DEVICE] + stage]
    at = a[a[FIRST] + d + 1] - 1
    while a[a[OWNED] + at] != stage:
        if a[a[NEXT_Y] + a[a[OWNED] + at]] <= j:
            return False
        at -= 1
    return True


def start_transfers(
    a: Store, link: int, now: int, heap: list[int]
) -> bool:
    """Start what an idle link should carry now; whether something started."""
    m = a[NUM_MICROBATCHES]
    i = come_back(a, link, now, heap)
    if i != NONE:
        stage = i // m
        d, j = a[a[DEVICE] + stage], i % m
        a[a[BACK_START] + i] = now
        a[a[USED] + d] += a[a[MOVES] + stage]
        early = 0 if next_on_device(a, stage, j) else a[a[MOVES] + stage]
        repin(a, stage, j, a[a[HOLDS] + stage], early)
        return carry(a, link, BACK, i, now + a[a[BACK_TICKS] + stage], heap)
    i = leave(a, link, now)
    if i != NONE:
        stage = i // m
        a[a[OUT_START] + i] = now
        a[HOST] += a[a[WIRE] + stage]
        repin(a, stage, i % m, a[a[HOLDS] + stage] - a[a[MOVES] + stage], 0)
        return carry(a, link, OUT, i, now + a[a[OUT_TICKS] + stage], heap)
    return False


def carry(a: Store, link: int, kind: int, i: int, end: int, heap: list[int]) -> bool:
    """Occupy a link with the transfer of op index ``i`` until ``end``."""
    a[a[LINK_KIND] + link] = kind
    a[a[LINK_STAGE] + link] = i // a[NUM_MICROBATCHES]
    a[a[LINK_J] + link] = i % a[NUM_MICROBATCHES]
    heapq.heappush(heap, (end << CODE_BITS) | (TRANSFER_ENDS << INDEX_BITS) | link)
    return True


def reload_claim(a: Store, d: int, j: int, key: int,
                 now: int) -> int:
    """Bytes that due reloads of ``d`` claim before an op of microbatch ``j`` with ``key``."""
    claim, m = 0, a[NUM_MICROBATCHES]
    for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
        stage = a[a[OWNED] + at]
        i = waiting_outside(a, stage)
        if i == NONE:
            continue
        k = i - stage * m
        if k <= j and a[a[KEY_Y] + i] - a[RELOAD_RANK] < key:
            due = y_ready_estimate(a, stage, k) - a[a[BACK_TICKS] + stage] - a[RELOAD_LEAD]
            if due <= now:
                claim += a[a[MOVES] + stage]
    return claim


def start_compute(
    a: Store, d: int, now: int, heap: list[int]
) -> bool:
    """Start the op that an idle device should run now; whether one started."""
    m, last = a[NUM_MICROBATCHES], a[NUM_STAGES] - 1
    a[a[BLOCKED] + d] = 0
    free = a[a[MEMORY] + d] - a[a[USED] + d]
    # Two rounds: the first finds the soonest possible end, which bounds how long to wait for a
    # better op (Giffler and Thompson); the second the least key among those that start in time.
    soonest = NO_LIMIT
    kind, stage_of, start_of, best_key = IDLE, 0, 0, 0
    blocked_key, blocked_j = NO_LIMIT, NO_LIMIT
    for round_ in range(2):
        horizon = now
        if round_ == 1:
            if soonest == NO_LIMIT:
                return False
            horizon = now + (max(0, soonest - now - 1) * a[PATIENCE]) // 1024
        for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
            stage = a[a[OWNED] + at]
            j = a[a[NEXT_Y] + stage]
            if j < a[a[NEXT_X] + stage]:
                i = stage * m + j
                ready = now
                if stage < last:
                    before = a[a[Y_START] + i + m]
                    ready = NO_LIMIT
                    if before != NONE:
                        ready = before + a[a[Y_TICKS] + stage + 1] + a[a[Y_HOP] + stage]
                if a[a[OUT_START] + i] != NONE:
                    if a[a[BACK_START] + i] == NONE:
                        ready = NO_LIMIT
                    else:
                        ready = max(ready, a[a[BACK_START] + i] + a[a[BACK_TICKS] + stage])
                if ready < NO_LIMIT and a[a[Y_TAKES] + stage] > free:
                    if ready <= now:
                        a[a[BLOCKED] + d] = 1
                    ready = NO_LIMIT
                if ready < NO_LIMIT:
                    ready = max(ready, now)
                    if round_ == 0:
                        soonest = min(soonest, ready + a[a[Y_TICKS] + stage])
                    elif ready <= horizon and (kind == IDLE or a[a[KEY_Y] + i] < best_key):
                        kind, stage_of, start_of, best_key = Y, stage, ready, a[a[KEY_Y] + i]
            j = a[a[NEXT_Z] + stage]
            if j < (m if a[Z_FIRST] else a[a[NEXT_Y] + stage]):
                i = stage * m + j
                fits = a[a[Z_TAKES] + stage] <= free and j < a[a[NEXT_Y] + 0] + a[IN_FLIGHT]
                if fits and a[Z_FIRST]:
                    early = z_early(a, stage, j)
                    fits = safe(a, d, j, a[a[Z_TAKES] + stage], early)
                if fits:
                    if round_ == 0:
                        soonest = min(soonest, now + a[a[Z_TICKS] + stage])
                    elif kind == IDLE or a[a[KEY_Z] + i] < best_key:
                        kind, stage_of, start_of, best_key = Z, stage, now, a[a[KEY_Z] + i]
            j = a[a[NEXT_X] + stage]
            if j < m and not (a[Z_FIRST] and a[a[NEXT_Z] + stage] <= j):
                i = stage * m + j
                ready = now
                if stage > 0:
                    before = a[a[X_START] + i - m]
                    ready = NO_LIMIT
                    if before != NONE:
                        ready = max(now, before + a[a[X_TICKS] + stage - 1] + a[a[X_HOP] + stage])
                elif j >= a[a[NEXT_Y] + 0] + a[IN_FLIGHT]:
                    ready = NO_LIMIT
                if ready == NO_LIMIT:
                    continue
                takes = a[a[X_TAKES] + stage]
                adds = a[a[HOLDS] + stage] - a[a[PIN] + i]
                if a[RELY] and a[a[MAY_LEAVE] + i]:
                    adds -= a[a[MOVES] + stage]
                fits = takes <= free
                if fits and a[HOST] > 0:
                    claim = reload_claim(a, d, j, a[a[KEY_X] + i], now)
                    fits = takes + claim <= free
                if fits:
                    fits = safe(a, d, j, adds, 0)
                if not fits:
                    if ready <= now:
                        a[a[BLOCKED] + d] = 1
                        if a[a[KEY_X] + i] < blocked_key:
                            blocked_key, blocked_j = a[a[KEY_X] + i], j
                    continue
                if round_ == 0:
                    soonest = min(soonest, ready + a[a[X_TICKS] + stage])
                elif a[a[KEY_X] + i] > blocked_key and j >= blocked_j:
                    continue  # leave the memory to the one that asked before
                elif ready <= horizon and (kind == IDLE or a[a[KEY_X] + i] < best_key):
                    kind, stage_of, start_of, best_key = X, stage, ready, a[a[KEY_X] + i]
    if kind == IDLE or start_of > now:
        return False  # an arrival or a transfer's end will ask again
    begin(a, d, kind, stage_of, now, heap)
    return True


def begin(
    a: Store, d: int, kind: int, stage: int, now: int, heap: list[int]
) -> None:
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
    a[a[RUNNING] + d], a[a[RUNNING_STAGE] + d], a[a[RUNNING_J] + d], a[a[RUNNING_END] + d] = kind, stage, j, end
    a[a[FORCED] + d] = 0
    heapq.heappush(heap, (end << CODE_BITS) | (COMPUTE_ENDS << INDEX_BITS) | d)


def z_early(a: Store, stage: int, j: int) -> int:
    """Bytes that Z(stage, j), coming first, takes before the X of a lower stage of its device."""
    d = a[a[DEVICE] + stage]
    if not a[RELY] or not a[a[ANY_MOVES] + d]:
        return 0
    at = a[a[FIRST] + d]
    while a[a[OWNED] + at] != stage:
        if a[a[NEXT_X] + a[a[OWNED] + at]] <= j:
            return a[a[Z_TAKES] + stage]
        at += 1
    return 0


def announce(a: Store, d: int, at: int, heap: list[int]) -> None:
    """Have device ``d`` look again at time ``at``, unless it is busy until then anyway."""
    if a[a[RUNNING] + d] == IDLE or a[a[RUNNING_END] + d] <= at:
        heapq.heappush(heap, (at << CODE_BITS) | (ARRIVAL << INDEX_BITS) | d)


def settle(a: Store, code: int) -> None:
    """Take note of one event: what ended gives back memory, and who should look again."""
    kind, index = code >> INDEX_BITS, code & ((1 << INDEX_BITS) - 1)
    if kind == COMPUTE_ENDS:
        stage = a[a[RUNNING_STAGE] + index]
        if a[a[RUNNING] + index] == X:
            a[a[USED] + index] -= a[a[X_GIVES] + stage]
        elif a[a[RUNNING] + index] == Y:
            a[a[USED] + index] -= a[a[Y_GIVES] + stage]
        else:
            a[a[USED] + index] -= a[a[Z_GIVES] + stage]
        a[a[RUNNING] + index] = IDLE
        a[a[DEVICE_DUE] + index] = 1
        if a[a[OUT_LINK] + index] >= 0:
            a[a[LINK_DUE] + a[a[OUT_LINK] + index]] = 1
        if a[a[BACK_LINK] + index] >= 0:
            a[a[LINK_DUE] + a[a[BACK_LINK] + index]] = 1
    elif kind == ARRIVAL:
        a[a[DEVICE_DUE] + index] = 1
    elif kind == WAKE:
        a[a[LINK_DUE] + index] = 1
        a[a[LINK_WAKE] + index] = NO_LIMIT
    else:
        stage = a[a[LINK_STAGE] + index]
        d = a[a[DEVICE] + stage]
        if a[a[LINK_KIND] + index] == OUT:
            a[a[USED] + d] -= a[a[MOVES] + stage]
        else:
            a[HOST] -= a[a[WIRE] + stage]
            if a[HOST_BYTES] < NO_LIMIT:
                for link in range(a[NUM_LINKS]):
                    a[a[LINK_DUE] + link] = 1
        a[a[LINK_KIND] + index] = IDLE
        a[a[LINK_DUE] + index] = 1
        a[a[LINK_DUE] + a[a[BACK_LINK] + d]] = 1
        a[a[DEVICE_DUE] + d] = 1


def start_all(a: Store, now: int, heap: list[int]) -> int:
    """Start whatever may start now; the number of ops started."""
    started = 0
    for d in range(a[NUM_DEVICES]):
        if a[a[DEVICE_DUE] + d]:
            a[a[DEVICE_DUE] + d] = 0
            if a[a[RUNNING] + d] == IDLE:
                if start_compute(a, d, now, heap):
                    started += 1
                if a[a[BLOCKED] + d] and a[a[OUT_LINK] + d] >= 0:
                    a[a[LINK_DUE] + a[a[OUT_LINK] + d]] = 1
    for _ in range(2):  # twice: a reload short of memory calls for the offload link of its device
        for link in range(a[NUM_LINKS]):
            if a[a[LINK_DUE] + link]:
                a[a[LINK_DUE] + link] = 0
                if a[a[LINK_KIND] + link] == IDLE and start_transfers(a, link, now, heap
                ):
                    started += 1
    return started


def build(a: Store) -> int:
    """Build a schedule into ``s``; its makespan in ticks, or NONE where it got stuck."""
    reset(a)
    heap = [0]
    heap.pop()
    left, makespan, now = 3 * a[NUM_STAGES] * a[NUM_MICROBATCHES], 0, 0
    stuck = False
    while True:
        started = start_all(a, now, heap)
        if len(heap) == 0:
            if left == 0:
                return makespan
            if stuck:
                return NONE
            stuck = True  # nothing runs: now evict and reload whatever makes room, due or not
            for d in range(a[NUM_DEVICES]):
                a[a[DEVICE_DUE] + d] = a[a[FORCED] + d] = 1
                if a[a[OUT_LINK] + d] >= 0:
                    a[a[LINK_DUE] + a[a[OUT_LINK] + d]] = 1
                if a[a[BACK_LINK] + d] >= 0:
                    a[a[LINK_DUE] + a[a[BACK_LINK] + d]] = 1
            continue
        if started:
            stuck = False
        now = heap[0] >> CODE_BITS
        while len(heap) > 0 and heap[0] >> CODE_BITS == now:
            code = heapq.heappop(heap) & ((1 << CODE_BITS) - 1)
            if code >> INDEX_BITS == COMPUTE_ENDS:
                left -= 1
                makespan = now
            settle(a, code)
    return NONE
