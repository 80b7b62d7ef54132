"""List scheduler: what the links carry. Reloads when they are due, offloads otherwise."""

from __future__ import annotations

import heapq

from megatron_optpipe.planner.flat import NO_LIMIT
from megatron_optpipe.planner.kernel_memory import next_on_device, repin, safe
from megatron_optpipe.planner.store import (
    BACK,
    BACK_LINK,
    BACK_START,
    BACK_TICKS,
    BLOCKED,
    CALLED,
    CODE_BITS,
    DEVICE,
    FIRST,
    FORCED,
    HOLDS,
    HOST,
    HOST_BYTES,
    INDEX_BITS,
    KEY_Y,
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
    NEWEST_IN,
    NEXT_Y,
    NONE,
    NUM_MICROBATCHES,
    NUM_STAGES,
    OLDEST_OUT,
    OUT,
    OUT_LINK,
    OUT_START,
    OUT_TICKS,
    OWNED,
    RELOAD_LEAD,
    RELOAD_RANK,
    TRANSFER_ENDS,
    USED,
    WAKE,
    WATER,
    WIRE,
    X_AT,
    X_END,
    X_PATH,
    X_TICKS,
    Y_AT,
    Y_END,
    Y_PATH,
    Y_TICKS,
    Store,
)


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


def come_back(a: Store, link: int, now: int, heap: list[int]) -> int:
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
                a[a[LINK_DUE] + a[a[OUT_LINK] + d]] = a[CALLED] = 1
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


def start_transfers(a: Store, link: int, now: int, heap: list[int]) -> bool:
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
