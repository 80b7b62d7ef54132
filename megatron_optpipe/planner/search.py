"""Search over what the list scheduler is told: shapes of key families first, then single keys.

Counted in schedules built, not in seconds, so that the same problem, options and seed give the same
plan; the wall clock only cuts off a machine that is much slower than expected.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.families import Family, Shape, mutated, random_shape
from megatron_optpipe.planner.feasible import Mode, modes
from megatron_optpipe.planner.flat import Flat
from megatron_optpipe.planner.listsched import ListScheduler, Times, compiled_for
from megatron_optpipe.planner.moves import Point, neighbour, points_of
from megatron_optpipe.planner.options import PlannerOptions
from megatron_optpipe.planner.portfolio import first_shapes
from megatron_optpipe.planner.realise import realise

_PLAIN_S, _COMPILED_S = 20e-6, 0.55e-6
"""Expected time to schedule one op, without offload; with, 2.5 times as much."""
_USE = 0.6
"""Share of the time limit that the expected time of the search may fill."""
_SHORT, _SHAPES, _BACKWARD = 0.3, 0.65, 0.07
"""Shares of the work: shapes on a shorter problem; shapes at all; of those, mirrored readings."""
_RANDOM = 0.35
"""Share of a reading's shapes, after the seeds, drawn at random before neighbours of the best."""
_CLOSE = 1.03
"""A mirrored reading gets more work if its best is at most so far behind."""
_LONG_OPS, _SHORT_PER_DEVICE = 2_000, 2
"""From so many compute ops on, shapes are first tried on so many microbatches a device."""
_ELITE, _PARENTS, _CLIMBS = 16, 6, 3
_FEWEST, _FEWEST_SHAPES, _MOST = 20, 8, 30_000
"""Schedules of the whole problem that the budget pays for."""
_LARGE_OPS = 20_000
"""From so many ops on only the best schedule is made a plan."""
_STUCK = 1 << 61


@dataclass
class Reading:
    """One reading of the problem with its scheduler, and the best shapes found in it."""

    flat: Flat
    family: Family
    scheduler: ListScheduler
    enough: int
    """No schedule is shorter."""
    elite: list[tuple[int, int, Shape]] = field(default_factory=list)
    """Makespan, serial number, shape; best first, makespans distinct."""

    @property
    def ops(self) -> int:
        return 3 * self.flat.num_stages * self.flat.num_microbatches


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

    def __init__(
        self, problem: Problem, options: PlannerOptions, starts: Sequence[Plan] = ()
    ) -> None:
        self.problem = problem
        self.starts = starts
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
        self.built = 0

    def _reading(self, flat: Flat, mode: Mode) -> Reading:
        scheduler = ListScheduler(flat, compiled=self.compiled)
        return Reading(flat, Family(flat, mode.may_leave), scheduler, _least_makespan(flat))

    def budget(self) -> int:
        """How many ops to schedule, all schedules together."""
        one_s = _COMPILED_S if self.compiled else _PLAIN_S
        if any(self.readings[0].family.may_leave):
            one_s *= 2.5
        most = int(_USE * self.options.time_limit_s / one_s)
        return max(_FEWEST * self.readings[0].ops, min(_MOST * self.readings[0].ops, most))

    def run(self) -> list[Found]:
        """Search within the budget; the best schedule of each climb, best first."""
        total = self.budget()
        seeds = [self._allowed(shape) for shape in first_shapes(self.readings[0].family)]
        spent = 0
        if self._short_microbatches() is not None:
            spent = int(total * _SHORT)
            seeds = self._on_a_shorter_problem(seeds, spent)
        ahead, behind = self.readings[::2], self.readings[1::2]
        left = int(total * _SHAPES) - spent
        for reading in ahead:
            self._shapes(reading, int(left * (1 - _BACKWARD)) // len(ahead), seeds)
        best = min((r.elite[0][0] for r in ahead if r.elite), default=_STUCK)
        for reading in behind:
            share = int(left * _BACKWARD) // len(behind)
            self._shapes(reading, share, seeds)
            if reading.elite and reading.elite[0][0] < _CLOSE * best:
                self._shapes(reading, 4 * share, [])
        return self._climbs(total - int(total * _SHAPES))

    def _short_microbatches(self) -> int | None:
        """Microbatches of the shorter problem; None where it would not be much shorter."""
        asked = self.options.max_microbatches
        if asked is None and self.readings[0].ops <= _LONG_OPS:
            return None
        short = asked or _SHORT_PER_DEVICE * self.problem.num_devices
        return short if 3 * short <= 2 * self.problem.num_microbatches else None

    def _on_a_shorter_problem(self, seeds: list[Shape], work: int) -> list[Shape]:
        """The best shapes of fewer microbatches; a shape says how any number goes through."""
        short = dataclasses.replace(self.problem, num_microbatches=self._short_microbatches() or 1)
        found: list[Shape] = []
        readings = [self._reading(mode.readings.forward, mode) for mode in modes(short)]
        for reading in readings:
            self._shapes(reading, work // len(readings), seeds)
            found += [shape for _, _, shape in reading.elite]
        return found

    def _climbs(self, work: int) -> list[Found]:
        """Local search from the best shapes of all readings."""
        starts = [
            (makespan, index, Point(*reading.family.keys(shape)))
            for index, reading in enumerate(self.readings)
            for makespan, _, shape in reading.elite[:_CLIMBS]
        ]
        for index, reading in enumerate(self.readings):
            if reading.flat.z_first:
                continue
            for plan in self.starts:
                for point in points_of(plan, reading.family, self.tick_ms):
                    if time.monotonic() < self.deadline:
                        starts.append((self._value(reading, point), index, point))
        starts = sorted(starts, key=lambda start: start[:2])[:_CLIMBS]
        if time.monotonic() > self.deadline:
            starts = starts[:1]
        found = [
            self._climb(self.readings[i], point, work // self.readings[i].ops // len(starts))
            for makespan, i, point in starts
            if makespan < _STUCK
        ]
        return sorted(found, key=lambda f: f.makespan)

    def _stop(self, best: int) -> bool:
        return best <= self.readings[0].enough or time.monotonic() > self.deadline

    def _value(self, reading: Reading, point: Point) -> int:
        self.built += 1
        makespan = reading.scheduler.makespan(*point)
        return _STUCK if makespan < 0 else makespan

    def _shapes(self, reading: Reading, work: int, seeds: list[Shape]) -> None:
        """The seeds, random shapes, then neighbours of the best, for so many scheduled ops."""
        devices, m = reading.flat.num_devices, reading.flat.num_microbatches
        seen = {entry[0] for entry in reading.elite}
        count = max(_FEWEST_SHAPES, work // reading.ops)
        for serial in range(count):
            if time.monotonic() > self.deadline or (reading.elite and self._done(reading)):
                return
            if serial < len(seeds):
                shape = seeds[serial]
            elif not reading.elite or serial - len(seeds) < (count - len(seeds)) * _RANDOM:
                shape = self._allowed(random_shape(self.dice, devices, m))
            else:
                parent = self.dice.choice(reading.elite[:_PARENTS])[2]
                shape = self._allowed(mutated(parent, self.dice, devices, m))
            makespan = self._value(reading, Point(*reading.family.keys(shape)))
            if makespan not in seen and makespan < _STUCK:
                seen.add(makespan)
                reading.elite.append((makespan, self.built, shape))
                reading.elite.sort(key=lambda entry: entry[:2])
                del reading.elite[_ELITE:]

    def _done(self, reading: Reading) -> bool:
        return reading.elite[0][0] <= reading.enough

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


def search_plans(
    problem: Problem,
    options: PlannerOptions,
    deadline_s: float | None = None,
    starts: Sequence[Plan] = (),
) -> Iterator[Plan]:
    """The best plans of a search (its second is at times the better plan). Raises ``Infeasible``.

    ``deadline_s``: when to stop at the latest, by ``time.monotonic``; default: the time limit.
    ``starts``: valid plans to improve, beside what the search finds by itself.
    """
    if deadline_s is not None and time.monotonic() > deadline_s:
        return
    search = Search(problem, options, starts)
    if deadline_s is not None:
        search.deadline = deadline_s
    for found in search.run()[: 1 if search.readings[0].ops > _LARGE_OPS else 2]:
        yield realise(problem, found.reading.flat, found.times(), "search")
