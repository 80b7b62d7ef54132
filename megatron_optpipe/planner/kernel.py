"""The list scheduler: compute order, offloads and reloads decided together, in order of time.

Plain functions on one flat store of whole numbers: run as they are on a list, or compiled by numba
on an array, with the same result (``listsched`` chooses). ``a[FIELD]`` is a scalar of the store,
``a[a[FIELD] + i]`` entry i of a column; ``store`` says what each field is.

At every moment each idle device takes, of the ops that may start, the one with the least key; each
idle link reloads what is due, or offloads what comes back last.
"""

from __future__ import annotations

import heapq

from megatron_optpipe.planner.flat import NO_LIMIT
from megatron_optpipe.planner.kernel_compute import start_compute
from megatron_optpipe.planner.kernel_transfers import find_newest_in, start_transfers
from megatron_optpipe.planner.store import (
    ARRIVAL,
    BACK_LINK,
    BACK_START,
    BLOCKED,
    CALLED,
    CODE_BITS,
    COMPUTE_ENDS,
    DEVICE,
    DEVICE_DUE,
    EARLY,
    EARLY_ALL,
    EARLY_BYTES,
    FORCED,
    HOST,
    HOST_BYTES,
    IDLE,
    INDEX_BITS,
    LINK_DUE,
    LINK_KIND,
    LINK_STAGE,
    LINK_WAKE,
    MOVES,
    NEWEST,
    NEWEST_IN,
    NEXT_X,
    NEXT_Y,
    NEXT_Z,
    NONE,
    NUM_DEVICES,
    NUM_LINKS,
    NUM_MICROBATCHES,
    NUM_STAGES,
    OLDEST_OUT,
    OUT,
    OUT_LINK,
    OUT_START,
    PIN,
    PINNED,
    PINNED_ALL,
    RUNNING,
    RUNNING_J,
    RUNNING_STAGE,
    USED,
    WAKE,
    WIRE,
    X_AT,
    X_END,
    X_GIVES,
    X_START,
    Y_AT,
    Y_END,
    Y_GIVES,
    Y_START,
    Z_GIVES,
    Z_START,
    Store,
    X,
    Y,
)


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
    a[HOST] = a[CALLED] = 0


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
    for _ in range(2):
        for link in range(a[NUM_LINKS]):
            if a[a[LINK_DUE] + link]:
                a[a[LINK_DUE] + link] = 0
                if a[a[LINK_KIND] + link] == IDLE and start_transfers(a, link, now, heap):
                    started += 1
        if not a[CALLED]:
            break
        a[CALLED] = 0  # a reload lacks memory: the offload link of its device looks once more
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
