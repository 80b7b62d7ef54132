"""The one flat store of whole numbers that the list scheduler works on.

``a[FIELD]`` is a scalar, or where a column begins: entry i of a column is ``a[a[FIELD] + i]``. One
sequence for everything is what compiles to fast code and still runs as plain Python on a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_optpipe.planner.flat import Flat

Store = list[int]

SCALARS = (
    # the problem (see Flat)
    NUM_STAGES, NUM_MICROBATCHES, NUM_DEVICES, NUM_LINKS, Z_FIRST, RELY, IN_FLIGHT, HOST_BYTES,
    # the habits (see Rules)
    PATIENCE, RELOAD_LEAD, LEAVE_MARGIN, WATER, RELOAD_RANK, SLACK,
    # the state: bytes on the host; 1: a reload short of memory has called an offload link
    HOST, CALLED,
) = tuple(range(16))  # fmt: skip

_BY_STAGE = (
    DEVICE, OWNED, X_TICKS, Y_TICKS, Z_TICKS, OUT_TICKS, BACK_TICKS, X_HOP, Y_HOP, X_TAKES, X_GIVES,
    Y_TAKES, Y_GIVES, Z_TAKES, Z_GIVES, HOLDS, MOVES, WIRE, X_PATH, Y_PATH,
    NEXT_X, NEXT_Y, NEXT_Z,  # microbatches whose X, Y, Z have started
    AHEAD,  # at most so many microbatches between X and Y of the stage
    OLDEST_OUT,  # oldest microbatch that left and has not started to come back; m: none
    NEWEST_IN,  # youngest microbatch that may leave now; -1: none
    CHOICE_KIND, CHOICE_STAGE, CHOICE_READY, CHOICE_KEY,  # scratch of start_compute
) = tuple(range(16, 46))  # fmt: skip

_BY_DEVICE = (
    FIRST,  # one entry more than devices
    MEMORY, ALONE, UNEVEN, OUT_LINK, BACK_LINK,
    RUNNING, RUNNING_STAGE, RUNNING_J, RUNNING_END,
    USED,  # bytes of device memory
    NEWEST,  # youngest microbatch that holds memory
    PINNED_ALL,  # bytes that can leave only by the microbatches' own progress
    EARLY_ALL,  # bytes of those held for an op after the microbatch's next one
    BLOCKED,  # 1: something waits for memory
    DEVICE_DUE, FORCED,
    RETURN_BYTES,  # the most that Y of one of its stages takes on top of what cannot leave
    MOVES_ALL,  # bytes that one microbatch may have away
) = tuple(range(46, 65))  # fmt: skip

_BY_LINK = (
    LINK_KIND, LINK_STAGE, LINK_J, LINK_DUE, LINK_WAKE,
    LINK_FIRST,  # where the devices of a link begin in LINK_DEVICE
) = tuple(range(65, 71))  # fmt: skip

LINK_DEVICE = 71  # devices of link 0, then of link 1, ...; each device at most twice

_BY_MICROBATCH = (
    X_AT, X_END,  # the last X that started, and its end
    Y_AT, Y_END,
) = tuple(range(72, 76))  # fmt: skip

_BY_OP = (
    KEY_X, KEY_Y, KEY_Z,  # of two ops that may start, the smaller key goes
    MAY_LEAVE,  # 0: this activation stays on the device
    X_START, Y_START, Z_START, OUT_START, BACK_START,  # the schedule; -1: not (yet)
    PIN, EARLY,
) = tuple(range(76, 87))  # fmt: skip

_BY_SHARE = (PINNED, EARLY_BYTES) = (87, 88)  # device * m + j
NONE = -1
IDLE, X, Y, Z = 0, 1, 2, 3
"""What a device runs."""
OUT, BACK = 1, 2
"""What a link carries (or IDLE)."""
COMPUTE_ENDS, ARRIVAL, TRANSFER_ENDS, WAKE = 0, 1, 2, 3
"""Events: time, what, and the device or link, packed in one number."""
CODE_BITS, INDEX_BITS = 20, 16

NUM_FIELDS = 89


def lay_out(flat: Flat) -> list[int]:
    """A store for ``flat`` with the problem filled in, the rest zero."""
    m = flat.num_microbatches
    lengths = {
        **dict.fromkeys(_BY_STAGE, 3 * flat.num_stages),
        **dict.fromkeys(_BY_DEVICE, flat.num_devices + 1),
        **dict.fromkeys(_BY_LINK, flat.num_links + 1),
        LINK_DEVICE: 2 * flat.num_devices,
        **dict.fromkeys(_BY_MICROBATCH, m),
        **dict.fromkeys(_BY_OP, flat.num_stages * m),
        **dict.fromkeys(_BY_SHARE, flat.num_devices * m),
    }
    store = [0] * (NUM_FIELDS + sum(lengths.values()))
    at = NUM_FIELDS
    for field, length in lengths.items():
        store[field] = at
        at += length
    for name, value in flat._asdict().items():
        field = globals()[name.upper()]
        if isinstance(value, int):
            store[field] = value
        else:
            store[store[field] : store[field] + len(value)] = value
    users: list[int] = []
    for link in range(flat.num_links + 1):
        store[store[LINK_FIRST] + link] = len(users)
        pairs = zip(flat.out_link, flat.back_link)
        users += [d for d, pair in enumerate(pairs) if link in pair]
    store[store[LINK_DEVICE] : store[LINK_DEVICE] + len(users)] = users
    for stage, d in enumerate(flat.device):
        store[store[MOVES_ALL] + d] += flat.moves[stage]
        back = flat.y_takes[stage] + flat.moves[stage]
        store[store[RETURN_BYTES] + d] = max(store[store[RETURN_BYTES] + d], back)
    return store


def column(store: Sequence[int], field: int, length: int) -> Sequence[int]:
    """A column of the store: a view of an array, a copy of a list."""
    return store[store[field] : store[field] + length]
