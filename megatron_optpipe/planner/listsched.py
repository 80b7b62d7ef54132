"""Runs the list scheduler: compiled by numba where it is installed, as plain Python otherwise."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_optpipe.planner import listsched_kernel as kernel
from megatron_optpipe.planner import store as st
from megatron_optpipe.planner.flat import NO_LIMIT, Flat

Ints = npt.NDArray[np.int64]

_COMPILE_ORDER = (
    "reset", "safe", "repin", "y_ready_estimate", "next_on_device", "z_early", "find_newest_in",
    "announce", "leave", "come_back", "carry", "start_transfers", "reload_claim", "y_ready",
    "x_ready", "x_fits", "choose", "least_key", "begin", "start_compute", "settle", "start_all", "build",
)  # fmt: skip


class Rules(NamedTuple):
    """The scheduler's habits, all whole numbers."""

    patience: int = 0
    """0..1024: wait for a better op for at most this share of the time any other would take."""
    reload_lead: int = 0
    """Ticks that a reload should end before its Y can be ready at the earliest."""
    leave_margin: int = 0
    """Offload only what stays away at least this many ticks."""
    water: int = 0
    """0..1024: offload while more than this share of the device's memory is used."""
    reload_rank: int = 0
    """Ticks by which a reload goes before its Y when both claim memory."""
    slack: int = NO_LIMIT
    """An X or Y may start only if its key is at most so much above that of every X and Y its
    device has yet to start; 0: strictly in the order of keys."""


class Keys(NamedTuple):
    """Of two ops that may start, the smaller key goes; by stage * m + j."""

    x: Ints
    y: Ints
    z: Ints
    may_leave: Ints
    """0: this activation stays on the device."""
    ahead: Ints
    """By stage: at most so many microbatches between X and Y."""


class Times(NamedTuple):
    """A schedule in ticks: starts by stage * m + j, -1 for a transfer that does not happen."""

    makespan: int
    x: Ints
    y: Ints
    z: Ints
    out: Ints
    back: Ints


def have_compiler() -> bool:
    """Whether numba (the optional extra ``fast``) is installed; does not import it."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled() -> Callable[[Any], int]:
    """The kernel compiled by numba; cached beside the source, so later processes start warm."""
    from numba import njit

    namespace = dict(vars(kernel))
    for name in _COMPILE_ORDER:
        plain = getattr(kernel, name)
        rebound = types.FunctionType(plain.__code__, namespace, name, plain.__defaults__)
        namespace[name] = njit(cache=True)(rebound)
    return namespace["build"]  # type: ignore[no-any-return]


class ListScheduler:
    """Builds schedules of one reading of a problem; holds the working storage between calls."""

    def __init__(self, flat: Flat, *, compiled: bool) -> None:
        self.flat = flat
        self.compiled = compiled
        self.ops = flat.num_stages * flat.num_microbatches
        self._build = _compiled() if compiled else kernel.build
        plain = st.lay_out(flat)
        self._store: Any = np.array(plain, np.int64) if compiled else plain

    def makespan(self, keys: Keys, rules: Rules) -> int:
        """Makespan in ticks of the schedule that ``keys`` and ``rules`` give; -1: got stuck."""
        a = self._store
        a[st.PATIENCE : st.PATIENCE + len(rules)] = (
            np.array(rules, np.int64) if self.compiled else rules
        )
        for field, part in zip((st.KEY_X, st.KEY_Y, st.KEY_Z, st.MAY_LEAVE, st.AHEAD), keys):
            at = int(a[field])
            a[at : at + len(part)] = part if self.compiled else part.tolist()
        return int(self._build(a))

    def times(self, makespan: int) -> Times:
        """The schedule of the last call of ``makespan``, copied."""
        fields = (st.X_START, st.Y_START, st.Z_START, st.OUT_START, st.BACK_START)
        return Times(
            makespan, *(np.array(st.column(self._store, f, self.ops), np.int64) for f in fields)
        )

    def run(self, keys: Keys, rules: Rules) -> Times | None:
        """The schedule that ``keys`` and ``rules`` give, or ``None`` where it got stuck."""
        makespan = self.makespan(keys, rules)
        return None if makespan == kernel.NONE else self.times(makespan)
