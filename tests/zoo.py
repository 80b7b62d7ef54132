"""A registry of tiny odd plans: every valid plan must run, however strange its order.

Each entry is a function of no arguments that returns a valid (problem, plan) pair. The odd ones
are made to trip an executor: weights held back to the very end, one microbatch at a time, the
adversary's random topological order, offloads of everything, half duplex, shared switches.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from megatron_optpipe.core import (
    Device,
    Link,
    Op,
    Orders,
    Plan,
    Problem,
    Stage,
    require_valid,
    time_orders,
)

GB = 10**9
HOST_PEAK = 10.0
"""What the host-limited entry needs at its peak, in activations: the limit just holds."""


def problem(
    stage_device: tuple[int, ...] = (0, 1),
    microbatches: int = 4,
    *,
    times: tuple[float, float, float] = (1.0, 1.2, 0.8),
    memory: float = 100.0,
    offload: bool = False,
    duplex: str = "full",
    gbps: float = 1000.0,
    p2p_ms: float = 0.1,
    frees: float = 0.5,
    host: float | None = None,
) -> Problem:
    """A problem in round figures: one activation of a stage is 1 GB; memory in activations.

    ``duplex``: ``full`` (two links a device), ``half`` (one link a device), ``switch`` (devices
    2i and 2i+1 share both links), ``one`` (a single link for everything).
    """
    devices = max(stage_device) + 1
    names = {
        "full": lambda d: (f"d2h{d}", f"h2d{d}"),
        "half": lambda d: (f"pcie{d}", f"pcie{d}"),
        "switch": lambda d: (f"d2h{d // 2}", f"h2d{d // 2}"),
        "one": lambda d: ("bus", "bus"),
    }[duplex]
    links = {name: Link(gbps) for d in range(devices) for name in names(d)} if offload else {}
    return Problem(
        num_microbatches=microbatches,
        stage_device=stage_device,
        stages=tuple(
            Stage(*times, GB, int(frees * GB), GB if offload else 0) for _ in stage_device
        ),
        devices=tuple(
            Device(int(memory * GB), *(names(d) if offload else (None, None)))
            for d in range(devices)
        ),
        links=links,
        p2p_ms=p2p_ms,
        host_memory_bytes=None if host is None else int(host * GB),
    )


def random_topological(p: Problem, seed: int) -> Orders:
    """The adversary: any order that data and rule 5 allow, picked by dice."""
    dice = random.Random(seed)
    done: set[Op] = set()
    compute: list[list[Op]] = [[] for _ in p.devices]
    heads = {(k, s): 0 for k in "FBW" for s in range(p.num_stages)}

    def free(kind: str, stage: int) -> bool:
        j = heads[kind, stage]
        if j >= p.num_microbatches:
            return False
        if kind == "F":
            return stage == 0 or Op("F", stage - 1, j) in done
        if kind == "B":
            after = stage == p.num_stages - 1 or Op("B", stage + 1, j) in done
            return after and Op("F", stage, j) in done
        return Op("B", stage, j) in done

    while True:
        options = [key for key in sorted(heads) if free(*key)]
        if not options:
            return Orders.without_offload(tuple(tuple(lane) for lane in compute))
        kind, stage = dice.choice(options)
        op = Op(kind, stage, heads[kind, stage])
        heads[kind, stage] += 1
        done.add(op)
        compute[p.device_of(stage)].append(op)


def one_at_a_time(p: Problem) -> Orders:
    """One microbatch goes through the whole pipeline before the next one starts."""
    compute: list[list[Op]] = [[] for _ in p.devices]
    stages = range(p.num_stages)
    for j in range(p.num_microbatches):
        for s in stages:
            compute[p.device_of(s)].append(Op("F", s, j))
        for s in reversed(stages):
            compute[p.device_of(s)] += [Op("B", s, j), Op("W", s, j)]
    return Orders.without_offload(tuple(tuple(lane) for lane in compute))


def all_forwards_first(p: Problem, *, weights_last: bool) -> Orders:
    """GPipe's order; with ``weights_last`` every W is held back to the very end."""
    compute: list[list[Op]] = [[] for _ in p.devices]
    for d in range(p.num_devices):
        lane = compute[d]
        lane += [Op("F", s, j) for s in p.stages_on(d) for j in range(p.num_microbatches)]
        for s in reversed(p.stages_on(d)):
            for j in range(p.num_microbatches):
                lane.append(Op("B", s, j))
                if not weights_last:
                    lane.append(Op("W", s, j))
        if weights_last:
            lane += [Op("W", s, j) for s in p.stages_on(d) for j in range(p.num_microbatches)]
    return Orders.without_offload(tuple(tuple(lane) for lane in compute))


def offload_all(p: Problem, orders: Orders) -> Orders:
    """Offload every activation in the order of F, reload in the order of B."""

    def lane(d: int, kind: str, by: str) -> tuple[Op, ...]:
        return tuple(Op(kind, o.stage, o.microbatch) for o in orders.compute[d] if o.kind == by)

    devices = range(p.num_devices)
    return Orders(
        orders.compute,
        tuple(lane(d, "O", "F") for d in devices),
        tuple(lane(d, "R", "B") for d in devices),
    )


def _timed(p: Problem, orders: Orders, name: str) -> tuple[Problem, Plan]:
    plan = time_orders(p, orders, method=name)
    require_valid(p, plan)
    return p, plan


INTERLEAVED_4X2 = (0, 1, 2, 3, 0, 1, 2, 3)
INTERLEAVED_2X2 = (0, 1, 0, 1)
V_SHAPE_2 = (0, 1, 1, 0)

ZOO: dict[str, Callable[[], tuple[Problem, Plan]]] = {
    "single-device": lambda: _timed(problem((0,)), one_at_a_time(problem((0,))), "single"),
    "one-microbatch": lambda: _timed(
        problem((0, 1, 2, 3), 1), one_at_a_time(problem((0, 1, 2, 3), 1)), "one"
    ),
    "one-at-a-time": lambda: _timed(
        problem((0, 1, 2, 3)), one_at_a_time(problem((0, 1, 2, 3))), "serial"
    ),
    "weights-last": lambda: _timed(
        problem((0, 1, 2, 3)),
        all_forwards_first(problem((0, 1, 2, 3)), weights_last=True),
        "weights-last",
    ),
    "two-ranks-two-chunks": lambda: _timed(
        problem(INTERLEAVED_2X2),
        all_forwards_first(problem(INTERLEAVED_2X2), weights_last=False),
        "gpipe",
    ),
    "v-shape": lambda: _timed(
        problem(V_SHAPE_2), random_topological(problem(V_SHAPE_2), 5), "adversary"
    ),
    "adversary-2x2": lambda: _timed(
        problem(INTERLEAVED_2X2, 5), random_topological(problem(INTERLEAVED_2X2, 5), 1), "adversary"
    ),
    "adversary-4": lambda: _timed(
        problem((0, 1, 2, 3), 6), random_topological(problem((0, 1, 2, 3), 6), 2), "adversary"
    ),
    "adversary-4x2": lambda: _timed(
        problem(INTERLEAVED_4X2, 4), random_topological(problem(INTERLEAVED_4X2, 4), 3), "adversary"
    ),
    "offload-all-full-duplex": lambda: _offloading("full", 2.0),
    "offload-all-half-duplex": lambda: _offloading("half", 2.0),
    "offload-all-shared-switch": lambda: _offloading("switch", 3.0),
    "offload-all-one-bus": lambda: _offloading("one", 4.0),
    "offload-slow-link": lambda: _offloading("full", 2.0, gbps=250.0),
    "offload-host-limit": lambda: _offloading("full", 3.0, host=HOST_PEAK),
    "zero-length-weights": lambda: _timed(
        problem((0, 1), times=(1.0, 2.0, 0.0)),
        all_forwards_first(problem((0, 1), times=(1.0, 2.0, 0.0)), weights_last=True),
        "zero-w",
    ),
}


def _offloading(
    duplex: str, memory: float, gbps: float = 1000.0, host: float | None = None
) -> tuple[Problem, Plan]:
    p = problem((0, 1, 2, 3), 4, offload=True, duplex=duplex, memory=memory, gbps=gbps, host=host)
    orders = offload_all(p, all_forwards_first(p, weights_last=False))
    return _timed(p, orders, f"offload-{duplex}")
