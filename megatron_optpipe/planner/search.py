"""Search over what the list scheduler is told: shapes of key families first, then single keys.

Counted in schedules built, not in seconds, so that the same problem, options and seed give the same
plan; the wall clock only cuts off a machine that is much slower than expected.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.families import Family, Shape, known_shapes, mutated, random_shape
from megatron_optpipe.planner.feasible import Mode, modes
from megatron_optpipe.planner.flat import Flat
from megatron_optpipe.planner.listsched import ListScheduler, Times, compiled_for
from megatron_optpipe.planner.moves import Point, neighbour
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.realise import realise

_PLAIN_S, _COMPILED_S = 16e-6, 0.7e-6
"""Expected time to schedule one op, without offload; with, three times as much."""
_USE = 0.6
"""Share of the time limit that the expected time of the search may fill."""
_SHAPES, _RANDOM, _MIRRORED = 0.55, 0.4, 0.2
"""Shares of the schedules: for shapes at all; of those drawn at random; of those read backwards."""
_ELITE, _PARENTS, _CLIMBS = 16, 6, 3
_STUCK = 1 << 61


@dataclass
class Reading:
    """One reading of the problem with its scheduler, and the best shapes found in it."""

    flat: Flat
    family: Family
    scheduler: ListScheduler
    elite: list[tuple[int, int, Shape]] = field(default_factory=list)
    """Makespan, serial number, shape; best first, makespans distinct."""


@dataclass
class Found:
    """The best schedule so far of one reading."""

    reading: Reading
    makespan: int
    point: Point

    def times(self) -> Times:
        times = self.reading.scheduler.run(*self.point)
        assert times is not None  # it ran before
        return times


class Search:
    """One search; ``run`` gives the best schedules found, at most one a reading."""

    def __init__(self, problem: Problem, options: PlannerOptions) -> None:
        self.problem = problem
        self.options = options
        self.dice = random.Random(options.seed)
        self.deadline = time.monotonic() + options.time_limit_s
        self.compiled = compiled_for(options.time_limit_s)
        self.readings = [
            self._reading(flat, mode)
            for mode in modes(problem)
            for flat in (mode.readings.forward, mode.readings.mirrored)
        ]
        self.tick_ms = modes(problem)[0].readings.tick_ms
        self.enough = _least_makespan(self.readings[0].flat)
        self.built = 0

    def _reading(self, flat: Flat, mode: Mode) -> Reading:
        scheduler = ListScheduler(flat, compiled=self.compiled)
        return Reading(flat, Family(flat, mode.may_leave), scheduler)

    def budget(self) -> int:
        """How many schedules to build."""
        flat = self.readings[0].flat
        one = 3 * flat.num_stages * flat.num_microbatches
        one_s = one * (_COMPILED_S if self.compiled else _PLAIN_S)
        if any(self.readings[0].family.may_leave):
            one_s *= 3
        count = int(_USE * self.options.time_limit_s / (one_s + 50e-6))
        return max(20, min(30_000, count))

    def run(self) -> list[Found]:
        """Search within the budget."""
        total = self.budget()
        shapes = int(total * _SHAPES)
        pairs = len(self.readings) // 2
        for index, reading in enumerate(self.readings):
            share = _MIRRORED if index % 2 else 1 - _MIRRORED
            self._shapes(reading, max(8, int(shapes * share / pairs)))
        starts = sorted(
            ((entry[0], index, entry[2]) for index, r in enumerate(self.readings)
             for entry in r.elite[:_CLIMBS]), key=lambda start: start[:2],
        )  # fmt: skip
        found: list[Found] = []
        climbs = starts[: _CLIMBS + 1]
        for _, index, shape in climbs:
            reading = self.readings[index]
            point = Point(*reading.family.keys(shape))
            found.append(self._climb(reading, point, (total - shapes) // len(climbs)))
        return sorted(found, key=lambda f: f.makespan)

    def _stop(self, best: int) -> bool:
        return best <= self.enough or time.monotonic() > self.deadline

    def _value(self, reading: Reading, point: Point) -> int:
        self.built += 1
        makespan = reading.scheduler.makespan(*point)
        return _STUCK if makespan < 0 else makespan

    def _shapes(self, reading: Reading, count: int) -> None:
        """Random shapes, then neighbours of the best."""
        devices, m = reading.flat.num_devices, reading.flat.num_microbatches
        seen: set[int] = set()
        known = [self._allowed(shape) for shape in known_shapes(devices)]
        for serial in range(count):
            if serial < len(known):
                shape = known[serial]
            elif serial < count * _RANDOM or not reading.elite:
                shape = self._allowed(random_shape(self.dice, devices, m))
            else:
                parent = self.dice.choice(reading.elite[:_PARENTS])[2]
                shape = self._allowed(mutated(parent, self.dice, devices, m))
            makespan = self._value(reading, Point(*reading.family.keys(shape)))
            if makespan not in seen and makespan < _STUCK:
                seen.add(makespan)
                reading.elite.append((makespan, serial, shape))
                reading.elite.sort(key=lambda entry: entry[:2])
                del reading.elite[_ELITE:]
            if reading.elite and self._stop(reading.elite[0][0]):
                return

    def _allowed(self, shape: Shape) -> Shape:
        """Bend a shape to the offload strategy."""
        strategy = self.options.offload_strategy
        if strategy == "aggressive":
            return dataclasses.replace(shape, water=0.0, keep=0)
        if strategy == "conservative":
            return dataclasses.replace(shape, water=1.0)
        return shape

    def _climb(self, reading: Reading, start: Point, count: int) -> Found:
        """Threshold accepting over single keys, caps and habits."""
        dice, unit = self.dice, reading.family.unit
        here = best = self._value(reading, start)
        point = top = start
        for step in range(count):
            if self._stop(best):
                break
            warmth = 0.3 * unit * (1 - step / count) ** 2
            other = neighbour(point, reading.family, dice)
            if self.options.offload_strategy != "auto":
                other = Point(other.keys, other.rules._replace(water=start.rules.water))
            value = self._value(reading, other)
            if value <= here + warmth * dice.random():
                point, here = other, value
                if value < best:
                    top, best = other, value
            if here > best + warmth:
                point, here = top, best
        return Found(reading, best, top)


def _least_makespan(flat: Flat) -> int:
    """A makespan that no schedule goes below: each device's first start and its work."""
    least = 0
    for d in range(flat.num_devices):
        own = flat.owned[flat.first[d] : flat.first[d + 1]]
        work = sum(flat.x_ticks[s] + flat.y_ticks[s] + flat.z_ticks[s] for s in own)
        head = min(flat.x_path[s] for s in own)
        least = max(least, head + work * flat.num_microbatches)
    return least


def search_plans(problem: Problem, options: PlannerOptions) -> Iterator[Plan]:
    """The plans of a search, likely best first. Raises ``Infeasible``."""
    search = Search(problem, options)
    for found in search.run():
        yield realise(problem, found.reading.flat, found.times(), "search")
