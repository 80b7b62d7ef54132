"""Families of keys: a dozen numbers that give every op of a schedule its place.

Two families. ``wave``: the key of an op is about when it would run if microbatch after microbatch
(or group after group) went through the stages at a steady pace; its numbers stretch, shift and
group that. ``slots``: the order of the generalised interleaved schedules (PipeOffload, 2503.01328):
so many forwards, then forward and backward in turn, in groups of microbatches. Around either:
when W runs, how many forwards may be ahead, and the list scheduler's habits.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_optpipe.planner.flat import NO_LIMIT, Flat
from megatron_optpipe.planner.listsched import Keys, Rules

Floats = npt.NDArray[np.float64]

UNBOUNDED = 99.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One member of a family. Times are in units of a device's work for one microbatch."""

    slots: int = 0
    """1: the slots family, 0: the wave family."""
    group: float = 1.0
    """Microbatches that go through a chunk together."""
    pace_x: float = 1.0
    pace_y: float = 1.0
    """Wave: distance of the microbatches of a group."""
    slope_x: float = 1.0
    slope_y: float = 1.0
    """Wave: stretch of the way through the stages."""
    odd_x: float = 1.0
    odd_y: float = 1.0
    """Wave: the stretch in every second chunk, as a multiple (V shapes like two paces)."""
    gap_x: float = 0.0
    gap_y: float = 0.0
    """Wave: extra distance from chunk to chunk."""
    turn: float = 0.0
    """Wave: extra distance from the last forward to the first backward; -30: backward first."""
    warm_group: float = 1.0
    warm_device: float = 1.0
    warm_more: float = 0.0
    """Slots: forwards ahead, by groups, by devices behind, and beyond."""
    z_lag: float = 0.0
    """How long after its B a W is due; 100: only when nothing else can run."""
    ahead_slope: float = UNBOUNDED
    ahead_more: float = 0.0
    """At most ahead_slope * lifespan + ahead_more microbatches ahead; UNBOUNDED: no limit."""
    slack: float = UNBOUNDED
    keep: int = 0
    """The last so many chunks of a device are not offloaded."""
    patience: float = 0.0
    """0..1, see Rules; so are the next ones."""
    lead: float = 0.0
    margin: float = 0.0
    water: float = 0.0
    rank: float = 0.0


_CHOICES: dict[str, tuple[float, ...]] = {
    "pace_x": (0.1, 0.3, 0.5, 0.8, 1.0),
    "pace_y": (0.1, 0.3, 0.5, 0.8, 1.0),
    "slope_x": (0.0, 0.5, 1.0, 1.5),
    "slope_y": (0.0, 0.5, 1.0, 1.5),
    "odd_x": (1.0, 1.0, 1.0, 0.5, 2.0),
    "odd_y": (1.0, 1.0, 1.0, 0.5, 2.0),
    "gap_x": (0.0, 0.0, 0.3, 1.0, 2.0, 4.0),
    "gap_y": (0.0, 0.0, 0.3, 1.0, 2.0, 4.0),
    "turn": (-30.0, -3.0, 0.0, 0.0, 1.0, 3.0),
    "warm_group": (0.0, 0.5, 1.0, 1.0),
    "warm_device": (1.0, 1.0, 1.5, 2.0),
    "warm_more": (-1.0, 0.0, 0.0, 1.0),
    "z_lag": (-100.0, 0.0, 0.3, 1.0, 2.0, 5.0, 100.0),
    "ahead_slope": (UNBOUNDED, UNBOUNDED, UNBOUNDED, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3),
    "ahead_more": (0.0, 0.5, 1.0, 1.5, 2.0),
    "slack": (UNBOUNDED, UNBOUNDED, UNBOUNDED, 0.0, 0.3, 0.6, 1.0, 2.0, 4.0),
    "keep": (0, 0, 0, 0, 1, 2),
    "patience": (0.0, 0.0, 0.3, 0.7, 1.0),
    "lead": (0.0, 0.0, 0.1, 0.3, -0.1),
    "margin": (0.0, 0.0, 0.5, 1.0),
    "water": (0.0, 0.0, 0.5, 0.8, 1.0),
    "rank": (0.0, 0.3, 1.0, 3.0),
    "slots": (0, 0, 1),
}
_REDRAWN = ("slots", "group", "keep", "patience", "water")


def random_shape(dice: random.Random, devices: int, microbatches: int) -> Shape:
    """Any member of either family."""
    drawn = {name: dice.choice(values) for name, values in _CHOICES.items()}
    drawn["group"] = dice.choice((1, 1, 2, devices // 2, devices, devices, microbatches))
    return Shape(**drawn)  # type: ignore[arg-type]


def mutated(shape: Shape, dice: random.Random, devices: int, microbatches: int) -> Shape:
    """A neighbour: one to three numbers changed a little or drawn anew."""
    changes: dict[str, float] = {}
    fresh = random_shape(dice, devices, microbatches)
    for _ in range(dice.choice((1, 1, 2, 3))):
        name = dice.choice(_NAMES)
        if name in _REDRAWN or dice.random() < 0.3:
            changes[name] = getattr(fresh, name)
        else:
            stretch, shift = math.exp(dice.gauss(0, 0.3)), dice.gauss(0, 0.15)
            changes[name] = getattr(shape, name) * stretch + shift
    return dataclasses.replace(shape, **changes)  # type: ignore[arg-type]


_NAMES = tuple(field.name for field in dataclasses.fields(Shape))


def known_shapes(family: Family) -> list[Shape]:
    """Where to begin: shapes of schedules known to be good at some limit."""
    flat, shapes = family.flat, []
    devices = flat.num_devices
    for group in dict.fromkeys((devices, max(1, devices // 2))):
        for z_lag in (0.01, 100.0):
            shapes.append(Shape(slots=1, group=group, warm_more=-1, z_lag=z_lag, slack=0.3))
            shapes.append(Shape(slots=1, group=group, z_lag=z_lag, slack=4.0, patience=0.3))
    for gap in (0.0, 1.0):
        shapes.append(Shape(turn=-30, z_lag=100, gap_x=gap, group=devices, pace_x=0.3, pace_y=0.5))
        shapes.append(
            Shape(
                group=99999,
                slope_x=1.5,
                slope_y=0,
                gap_x=gap,
                gap_y=2 * gap,
                z_lag=100,
                patience=0.3,
                pace_x=0.8,
            )
        )
        shapes.append(Shape(slope_x=0, z_lag=100, gap_y=gap, pace_x=0.3, pace_y=0.3))
        shapes.append(Shape(ahead_slope=1, ahead_more=1, gap_x=gap, z_lag=1, patience=0.7))
        shapes.append(Shape(turn=-30, z_lag=0, patience=1.0, gap_x=gap))
    # The building blocks of Controllable Memory (2405.15362), V-Min and V-Half: forwards go down
    # and up the V by so many slots a device, backwards likewise; six slots a microbatch.
    slot = family.unit / 6
    step_x = max(1.0, flat.x_path[-1] / max(1, flat.num_stages - 1))
    step_y = max(1.0, flat.y_path[0] / max(1, flat.num_stages - 1))
    for down, up, gap_x, turn, gap_y, patience in (
        (1, 1, 0, 0, 0, 1.0), (1, 1, 0, 3, 0, 1.0), (1, 2, 1, 2, 2, 0.0), (2, 1, 3, -1, 4, 0.0),
    ):  # fmt: skip
        shapes.append(
            Shape(
                slope_x=down * slot / step_x,
                odd_x=up / down,
                slope_y=up * slot / step_y,
                odd_y=down / up,
                gap_x=gap_x / 6,
                turn=(turn - gap_x) / 6,
                gap_y=gap_y / 6,
                z_lag=1.0,
                slack=0.12,
                patience=patience,
            )
        )
    return shapes


class Family:
    """Turns shapes into keys for one reading of a problem."""

    def __init__(self, flat: Flat, may_leave: tuple[bool, ...]) -> None:
        m = flat.num_microbatches
        self.flat = flat
        self.stage, self.j = np.divmod(np.arange(flat.num_stages * m, dtype=np.int64), m)
        chunk, place = [], []
        seen: dict[int, int] = {}
        work = [0] * flat.num_devices
        for s, d in enumerate(flat.device):
            place.append(list(seen).index(d) if d in seen else len(seen))
            chunk.append(seen.setdefault(d, 0))
            seen[d] += 1
            work[d] += flat.x_ticks[s] + flat.y_ticks[s] + flat.z_ticks[s]
        self.unit = max(work)
        self.chunks = max(seen.values())
        last_chunk = np.array([seen[d] - 1 for d in flat.device])
        self.chunk_of_stage = np.array(chunk)
        self.from_last = last_chunk - self.chunk_of_stage
        self.chunk = self.chunk_of_stage[self.stage]
        self.place = np.array(place)[self.stage]
        odd = self.chunk_of_stage % 2
        x_steps = np.diff(flat.x_path, prepend=0)
        y_steps = -np.diff(flat.y_path, append=0)
        self.x_odd = np.cumsum(x_steps * odd)[self.stage]
        self.x_path = np.asarray(flat.x_path)[self.stage] - self.x_odd
        self.y_odd = np.cumsum((y_steps * odd)[::-1])[::-1][self.stage]
        self.y_path = np.asarray(flat.y_path)[self.stage] - self.y_odd
        self.may_leave = np.asarray(may_leave, np.int64)
        last = flat.num_stages - 1
        self.life = np.array(
            [
                flat.x_path[last] - flat.x_path[s] + flat.x_ticks[last]
                + flat.y_path[s] + flat.y_ticks[s]
                for s in range(flat.num_stages)
            ]
        )  # fmt: skip

    def keys(self, shape: Shape) -> tuple[Keys, Rules]:
        """What the list scheduler needs to follow ``shape``."""
        unit = self.unit
        x, y = self._slots(shape) if shape.slots else self._wave(shape)
        z = y + shape.z_lag * unit
        most = self.flat.num_microbatches
        if shape.ahead_slope < UNBOUNDED / 2:
            ahead = shape.ahead_slope * self.life / unit + shape.ahead_more
            ahead_of = np.clip(ahead, 1, most).astype(np.int64)
        else:
            ahead_of = np.full(self.flat.num_stages, most, np.int64)
        leave = self.may_leave * (self.from_last >= shape.keep)
        keys = Keys(
            x.astype(np.int64), y.astype(np.int64), z.astype(np.int64), leave[self.stage], ahead_of
        )
        rules = Rules(
            patience=round(1024 * min(1.0, max(0.0, shape.patience))),
            reload_lead=int(shape.lead * unit),
            leave_margin=int(shape.margin * unit),
            water=round(1024 * min(1.0, max(0.0, shape.water))),
            reload_rank=int(shape.rank * unit),
            slack=max(0, int(shape.slack * unit)) if shape.slack < UNBOUNDED / 2 else NO_LIMIT,
        )
        return keys, rules

    def _wave(self, shape: Shape) -> tuple[Floats, Floats]:
        unit, group = self.unit, max(1, int(shape.group))
        behind = self.j // group * group * unit
        within = self.j % group * unit
        x_way = (self.x_path + self.x_odd * shape.odd_x) * shape.slope_x
        y_way = (self.y_path + self.y_odd * shape.odd_y) * shape.slope_y
        x = behind + within * shape.pace_x + x_way
        x = x + self.chunk * (shape.gap_x * unit)
        turn = float(x_way[-1])
        turn += (shape.turn + self.chunks * shape.gap_x) * unit
        y = behind + within * shape.pace_y + turn + y_way
        y = y + (self.chunks - 1 - self.chunk) * (shape.gap_y * unit)
        return x, y

    def _slots(self, shape: Shape) -> tuple[Floats, Floats]:
        m, group = self.flat.num_microbatches, max(1, int(shape.group))
        start = self.j // group * group
        size = np.minimum(group, m - start)
        nth_x = start * self.chunks + self.chunk * size + self.j % group
        nth_y = start * self.chunks + (self.chunks - 1 - self.chunk) * size + self.j % group
        behind = self.flat.num_devices - self.place
        warm = shape.warm_group * group * (self.chunks - 1) + shape.warm_device * behind
        warm = np.maximum(1, (warm + shape.warm_more).astype(np.int64))
        slot = self.unit / self.chunks / 2
        x = np.where(nth_x < warm, nth_x, warm + 2 * (nth_x - warm))
        return x * slot, (warm + 2 * nth_y + 1) * slot
