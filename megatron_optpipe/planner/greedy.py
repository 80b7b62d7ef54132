"""The quickest plans: a few runs of the list scheduler with fixed keys and habits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_optpipe.planner.feasible import Mode
from megatron_optpipe.planner.flat import Flat
from megatron_optpipe.planner.listsched import Keys, ListScheduler, Rules, Times


def basic_keys(flat: Flat, may_leave: tuple[bool, ...], *, z_late: bool) -> Keys:
    """Y before X, older microbatches first, deeper stages first; Z as soon or as late as can be."""
    stage, j = np.divmod(np.arange(flat.num_stages * flat.num_microbatches), flat.num_microbatches)
    step, far = flat.num_stages, flat.num_stages * flat.num_microbatches
    leave = np.asarray(may_leave, np.int64)[stage]
    y = j * step + step - stage
    return Keys(
        x=far + j * step + stage,
        y=y,
        z=y + 4 * far if z_late else y,
        may_leave=leave,
        ahead=np.full(flat.num_stages, flat.num_microbatches),
    )


def greedy_times(mode: Mode, *, compiled: bool = False) -> Iterator[tuple[Flat, Times]]:
    """Feasible schedules, the likely best first."""
    flat = mode.readings.forward
    scheduler = ListScheduler(flat, compiled=compiled)
    for z_late in (True, False):
        for water in (0, 1024):
            times = scheduler.run(
                basic_keys(flat, mode.may_leave, z_late=z_late), Rules(water=water)
            )
            if times is not None:
                yield flat, times
