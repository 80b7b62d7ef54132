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
    AHEAD,
    ALONE,
    ANY_MOVES,
    BACK_LINK,
    BACK_START,
    BACK_TICKS,
    BLOCKED,
    CHOICE_KEY,
    CHOICE_KIND,
    CHOICE_READY,
    CHOICE_STAGE,
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
    LINK_DEVICE,
    LINK_DUE,
    LINK_FIRST,
    LINK_J,
    LINK_KIND,
    LINK_STAGE,
    LINK_WAKE,
    MAY_LEAVE,
    MEMORY,
    MOVES,
    MOVES_ALL,
    NEWEST,
    NEWEST_IN,
    NEXT_X,
    NEXT_Y,
    NEXT_Z,
    NUM_DEVICES,
    NUM_LINKS,
    NUM_MICROBATCHES,
    NUM_STAGES,
    OLDEST_OUT,
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
    RETURN_BYTES,
    RUNNING,
    RUNNING_END,
    RUNNING_J,
    RUNNING_STAGE,
    SLACK,
    Store,
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
        a[a[X_START] + i] = a[a[Y_START] + i] = a[a[Z_START] + i] = NONE
        a[a[OUT_START] + i] = a[a[BACK_START] + i] = NONE
        a[a[PIN] + i] = a[a[EARLY] + i] = 0
    for i in range(a[NUM_STAGES]):
        a[a[NEXT_X] + i] = a[a[NEXT_Y] + i] = a[a[NEXT_Z] + i] = 0
        a[a[OLDEST_OUT] + i] = m
        a[a[NEWEST_IN] + i] = NONE
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
    for user in range(a[a[LINK_FIRST] + link], a[a[LINK_FIRST] + link + 1]):
        d = a[a[LINK_DEVICE] + user]
        if a[a[OUT_LINK] + d] != link:
            continue
        short = a[a[BLOCKED] + d]
        if not short and a[a[USED] + d] * 1024 <= a[a[MEMORY] + d] * a[WATER]:
            continue
        for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
            stage = a[a[OWNED] + at]
            j = a[a[NEWEST_IN] + stage]
            if j < a[a[NEXT_Y] + stage] or a[HOST] + a[a[WIRE] + stage] > a[HOST_BYTES]:
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
    for user in range(a[a[LINK_FIRST] + link], a[a[LINK_FIRST] + link + 1]):
        d = a[a[LINK_DEVICE] + user]
        if a[a[BACK_LINK] + d] != link:
            continue
        for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
            stage = a[a[OWNED] + at]
            j = a[a[OLDEST_OUT] + stage]
            if j == m:
                continue
            i = stage * m + j
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
        j += 1
        while j < m and (
            a[a[OUT_START] + stage * m + j] == NONE or a[a[BACK_START] + stage * m + j] != NONE
        ):
            j += 1
        a[a[OLDEST_OUT] + stage] = j
        j = i % m
        a[a[USED] + d] += a[a[MOVES] + stage]
        early = 0 if next_on_device(a, stage, j) else a[a[MOVES] + stage]
        repin(a, stage, j, a[a[HOLDS] + stage], early)
        return carry(a, link, BACK, i, now + a[a[BACK_TICKS] + stage], heap)
    i = leave(a, link, now)
    if i != NONE:
        stage = i // m
        a[a[OUT_START] + i] = now
        a[a[OLDEST_OUT] + stage] = min(a[a[OLDEST_OUT] + stage], i % m)
        find_newest_in(a, stage, i % m - 1)
        a[HOST] += a[a[WIRE] + stage]
        repin(a, stage, i % m, a[a[HOLDS] + stage] - a[a[MOVES] + stage], 0)
        return carry(a, link, OUT, i, now + a[a[OUT_TICKS] + stage], heap)
    return False


def find_newest_in(a: Store, stage: int, j: int) -> None:
    """Note the youngest activation of a stage, from ``j`` downwards, that may leave."""
    base = stage * a[NUM_MICROBATCHES]
    least = a[a[NEXT_Y] + stage]
    while j >= least and not (a[a[OUT_START] + base + j] == NONE and a[a[MAY_LEAVE] + base + j]):
        j -= 1
    a[a[NEWEST_IN] + stage] = j if j >= least else NONE


def carry(a: Store, link: int, kind: int, i: int, end: int, heap: list[int]) -> bool:
    """Occupy a link with the transfer of op index ``i`` until ``end``."""
    a[a[LINK_KIND] + link] = kind
    a[a[LINK_STAGE] + link] = i // a[NUM_MICROBATCHES]
    a[a[LINK_J] + link] = i % a[NUM_MICROBATCHES]
    heapq.heappush(heap, (end << CODE_BITS) | (TRANSFER_ENDS << INDEX_BITS) | link)
    return True


def reload_claim(a: Store, d: int, j: int, key: int, now: int) -> int:
    """Bytes that due reloads of ``d`` claim before an op of microbatch ``j`` with ``key``."""
    claim, m = 0, a[NUM_MICROBATCHES]
    for at in range(a[a[FIRST] + d], a[a[FIRST] + d + 1]):
        stage = a[a[OWNED] + at]
        k = a[a[OLDEST_OUT] + stage]
        if k < j and a[a[KEY_Y] + stage * m + k] - a[RELOAD_RANK] < key:
            due = y_ready_estimate(a, stage, k) - a[a[BACK_TICKS] + stage] - a[RELOAD_LEAD]
            if due <= now:
                claim += a[a[MOVES] + stage]
    return claim


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
            elif takes > free and j == a[a[NEXT_X] + stage]:
                if stage == 0 or a[a[X_START] + base - m + j] != NONE:
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


def choose(a: Store, choices: int, kind: int, stage: int, ready: int, key: int) -> int:
    """Add one choice of an idle device; the number of choices."""
    a[a[CHOICE_KIND] + choices] = kind
    a[a[CHOICE_STAGE] + choices] = stage
    a[a[CHOICE_READY] + choices] = ready
    a[a[CHOICE_KEY] + choices] = key
    return choices + 1


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
    a[a[RUNNING] + d], a[a[RUNNING_STAGE] + d] = kind, stage
    a[a[RUNNING_J] + d], a[a[RUNNING_END] + d] = j, end
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
            if a[a[MOVES] + stage] > 0:
                find_newest_in(a, stage, a[a[RUNNING_J] + index])
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
