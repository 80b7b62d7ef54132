"""Work-and-time bounds of memory: bytes times ms that activations must lie on a device.

Every microbatch keeps the activations of a stage on its device at least from the start of F to the
end of W of the shortest round trip. Offloading takes them away in between, but each offload takes
time on links, and a link has no more time than the iteration. A device offers its limit times the
makespan, less the ramps: at first only as much can lie there as forwards have started, at the end
no more than the remaining backwards can take away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.bound_device import Reach

BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class _Stay:
    """One stage: byte-ms a microbatch, and what offloading one saves at most."""

    stage: int
    needed: float
    saved: float
    out_ms: float
    back_ms: float


@dataclass(frozen=True, slots=True)
class _Room:
    """What one device offers: nothing before ``head_ms``, then up to the limit."""

    limit: float
    head_ms: float
    up: float
    """Most bytes a ms that forwards bring, and (``step``) the first at once."""
    step: float
    down: float
    last: float

    def area(self, until_ms: float) -> float:
        """Most byte-ms that can lie on the device by ``until_ms``."""
        span = until_ms - self.head_ms
        if span <= 0:
            return 0.0
        bends = [0.0, span]
        for bend in (
            (self.limit - self.step) / self.up,
            span - (self.limit - self.last) / self.down,
            (self.last + self.down * span - self.step) / (self.up + self.down),
        ):
            if 0.0 < bend < span:
                bends.append(bend)
        bends.sort()
        height = [
            min(self.limit, self.step + self.up * g, self.last + self.down * (span - g))
            for g in bends
        ]
        return sum(
            (g1 - g0) * (h0 + h1) / 2
            for g0, g1, h0, h1 in zip(bends, bends[1:], height, height[1:])
        )


def energy_bound_ms(problem: Problem, reach: Reach, least_ms: float) -> float:
    """The least makespan, not below ``least_ms``, at which all activations find their time."""
    many = problem.num_microbatches
    trips = _trips(problem)
    stays = [
        [_stay(problem, s, trips[s]) for s in problem.stages_on(d)]
        for d in range(problem.num_devices)
    ]
    rooms = [_room(problem, reach, d) for d in range(problem.num_devices)]
    tight = [
        d
        for d in range(problem.num_devices)
        if sum(
            problem.stages[s].activation_bytes + max(0, -problem.stages[s].backward_frees_bytes)
            for s in problem.stages_on(d)
        )
        * many
        > problem.devices[d].memory_bytes
    ]
    if not tight:
        return least_ms
    links = _Links(problem, reach)

    def fits(makespan_ms: float) -> bool:
        lacking = {}
        for d in tight:
            lack = many * sum(stay.needed for stay in stays[d]) - rooms[d].area(makespan_ms)
            if lack > 0:
                lacking[d] = lack
        return links.can_save(stays, lacking, makespan_ms)

    if fits(least_ms):
        return least_ms
    low, high = least_ms, 2.0 * least_ms
    for _ in range(30):
        if fits(high):
            break
        low, high = high, 2.0 * high
    else:
        return least_ms  # no plan at any length, or numbers too odd to judge
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low * (1 - 1e-9)


def _trips(problem: Problem) -> list[float]:
    """For every stage, the least time from the start of F to the end of B of one microbatch."""
    trips = [0.0] * problem.num_stages
    below = 0.0
    for s in reversed(range(problem.num_stages)):
        stage = problem.stages[s]
        trips[s] = below + stage.forward_ms + stage.backward_input_ms
        if s:
            here, up = problem.device_of(s), problem.device_of(s - 1)
            below = trips[s] + problem.hop_ms(up, here) + problem.hop_ms(here, up)
    return trips


def _stay(problem: Problem, s: int, trip: float) -> _Stay:
    stage = problem.stages[s]
    whole, frees = stage.activation_bytes, stage.backward_frees_bytes
    weight = stage.backward_weight_ms
    needed = whole * trip + (whole - frees) * weight
    needed += max(0, -frees) * stage.backward_input_ms
    if not problem.can_offload(s):
        return _Stay(s, needed, 0.0, 0.0, 0.0)
    out, back = (problem.duration_ms(Op(kind, s, 0)) for kind in "OR")
    present = stage.forward_ms + out + back + stage.backward_input_ms
    saved = stage.offload_bytes * max(0.0, trip - present) - whole * max(0.0, present - trip)
    return _Stay(s, needed, max(0.0, saved), out, back)


def _room(problem: Problem, reach: Reach, d: int) -> _Room:
    stages = [problem.stages[s] for s in problem.stages_on(d)]
    head = float(min(reach.head["F"][s][0] for s in problem.stages_on(d)))
    most = max(stage.activation_bytes + max(0, -stage.backward_frees_bytes) for stage in stages)
    rates_up, rates_down = [], []
    for stage in stages:
        negative = max(0, -stage.backward_frees_bytes)
        rates_up.append(_rate(stage.activation_bytes, stage.forward_ms))
        rates_up.append(_rate(negative, stage.backward_input_ms))
        rest = stage.activation_bytes - stage.backward_frees_bytes
        rates_down.append(_rate(rest, stage.backward_weight_ms))
        rates_down.append(
            _rate(stage.activation_bytes, stage.backward_input_ms + stage.backward_weight_ms)
        )
        # (What leaves over a link after this time must return, and its B and W must still run.)
    return _Room(
        float(problem.devices[d].memory_bytes),
        head,
        max(rates_up),
        float(most),
        max(rates_down),
        float(most),  # one op may be half done: its activation goes at once
    )


def _rate(size: int, duration_ms: float) -> float:
    if size <= 0:
        return 1e-9
    return size / max(duration_ms, 1e-6)


class _Links:
    """Link time that offloads need and that an iteration offers."""

    def __init__(self, problem: Problem, reach: Reach) -> None:
        self.problem = problem
        self.closed_ms: dict[str, float] = {}  # before the first and after the last transfer
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for s in range(problem.num_stages):
            if not problem.can_offload(s):
                continue
            out, back = Op("O", s, 0), Op("R", s, 0)
            begin = float(reach.head["F"][s][0]) + problem.stages[s].forward_ms
            close = float(reach.tail["B"][s][-1]) + problem.stages[s].backward_input_ms
            for op, opens, closes in (
                (out, begin, close + problem.duration_ms(back)),
                (back, begin + problem.duration_ms(out), close),
            ):
                name = problem.link_name(op)
                first[name] = min(first.get(name, opens), opens)
                last[name] = min(last.get(name, closes), closes)
        for name in first:
            self.closed_ms[name] = first[name] + last[name]

    def can_save(
        self, stays: list[list[_Stay]], lacking: dict[int, float], makespan_ms: float
    ) -> bool:
        """Whether offloads within link time can take what the devices lack (relaxed: fractions)."""
        if not lacking:
            return True
        choices = [(d, stay) for d in lacking for stay in stays[d] if stay.saved > 0]
        if {d for d, _ in choices} != set(lacking):
            return False
        names = sorted(self.closed_ms)
        devices = sorted(lacking)
        rows = np.zeros((len(devices) + len(names), len(choices)))
        limits = np.zeros(len(devices) + len(names))
        for c, (d, stay) in enumerate(choices):
            rows[devices.index(d), c] = -stay.saved / lacking[d]
            out, back = Op("O", stay.stage, 0), Op("R", stay.stage, 0)
            for op, lasts in ((out, stay.out_ms), (back, stay.back_ms)):
                rows[len(devices) + names.index(self.problem.link_name(op)), c] += lasts
        limits[: len(devices)] = -1.0
        for k, name in enumerate(names):
            limits[len(devices) + k] = max(0.0, makespan_ms - self.closed_ms[name])
        result = linprog(
            np.zeros(len(choices)),
            A_ub=rows,
            b_ub=limits * (1 + 1e-9) + 1e-9,
            bounds=(0, self.problem.num_microbatches),
            method="highs",
        )
        return bool(result.status == 0)
