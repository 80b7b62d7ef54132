"""Shapes that long searches ended at: together they are good nearly everywhere.

``portfolio.json`` holds them; what is left out of a shape is the default of ``Shape``. The first 26
were chosen from some three hundred so that the best of the first n is, on average over eighty
problems, as close as can be to what thousands of schedules found for each: 5 % longer with four,
1.1 % with twelve, 0.4 % with all. The problems: 4x8, 8x16 and 16x32 (devices x microbatches), 1, 2
and 4 chunks, V shaped or interleaved, F:B:W = 1:1:1 and 1:1.2:0.8, memory from 1/16 of 1F1B's to
more than it, with offload at several speeds and without. The last ten were chosen in the same way
for 26 more problems without offload, 2 and 4 chunks, at 0.37 to 0.7 of 1F1B's memory, where they
are 5 % shorter on average than the best of the others.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from megatron_optpipe.planner.families import Family, Shape, known_shapes

_MOST_HELP = 8


def first_shapes(family: Family) -> list[Shape]:
    """All shapes to begin with, those that help most first."""
    found = portfolio(family.flat.num_devices, family.flat.num_microbatches)
    return [*found[:_MOST_HELP], *known_shapes(family), *found[_MOST_HELP:]]


def portfolio(devices: int, microbatches: int) -> list[Shape]:
    """The shapes for so many devices, those that help most first."""
    groups = {"all": microbatches, "devices": devices, "half": max(1, devices // 2)}
    return [
        Shape(**entry["shape"], group=groups.get(entry["group"], entry["group"]))
        for entry in _entries()
    ]


@functools.cache
def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(
        files(__package__).joinpath("portfolio.json").read_text(encoding="utf-8")
    )
    return entries
