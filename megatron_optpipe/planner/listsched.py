"""Runs the list scheduler: compiled by numba where it is installed, as plain Python otherwise."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_optpipe.core.files import write_atomically
from megatron_optpipe.planner import flat, kernel, kernel_compute, kernel_memory, kernel_transfers
from megatron_optpipe.planner import store as st
from megatron_optpipe.planner.flat import NO_LIMIT, Flat

_SOURCES = (flat, st, kernel_memory, kernel_transfers, kernel_compute, kernel)
_LOADING_PAYS_S, _COMPILING_PAYS_S = 2.0, 45.0
"""Time limits from which the compiled form is used: kept on disk, or not yet."""

Ints = npt.NDArray[np.int64]

_COMPILE_ORDER = (
    "safe", "repin", "next_on_device", "z_early", "y_ready_estimate", "find_newest_in", "leave",
    "come_back", "carry", "start_transfers", "reload_claim", "announce", "y_ready", "x_ready",
    "x_fits", "choose", "least_key", "begin", "start_compute", "reset", "settle", "start_all",
    "build",
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


@functools.cache
def _home() -> Path | None:
    """Where the compiled kernel is kept: a directory named by what it was compiled from."""
    digest = hashlib.sha256()
    for module in _SOURCES:
        digest.update(Path(str(module.__file__)).read_bytes())
    home = Path.home() / ".cache" / "megatron-optpipe" / digest.hexdigest()[:16]
    try:
        home.mkdir(parents=True, exist_ok=True)
        source = home / "list_scheduler.py"
        if not source.exists():
            write_atomically(source, "# the list scheduler of megatron_optpipe\n")
    except OSError:
        return None
    return home


def compiled_for(time_limit_s: float) -> bool:
    """Whether to run compiled: numba is there, and loading (1 s) or compiling (30 s) pays."""
    if importlib.util.find_spec("numba") is None:
        return False
    home = _home()
    ready = home is not None and any((home / "__pycache__").glob("list_scheduler.build-*.nbc"))
    if time_limit_s < (_LOADING_PAYS_S if ready else _COMPILING_PAYS_S):
        return False
    try:
        _compiled()
    except Exception:  # whatever is wrong with an optional compiler, the plain form does the same
        return False
    return True


@functools.cache
def _compiled() -> Callable[[Any], int]:
    """The kernel compiled by numba; kept on disk, so later processes start warm."""
    from numba import int64, njit

    home = _home()
    namespace: dict[str, Any] = {}
    for module in _SOURCES:
        namespace |= vars(module)
    for name in _COMPILE_ORDER:
        plain = namespace[name]
        code = plain.__code__
        if home is not None:
            # numba keeps its files beside the file that the code says it comes from
            code = code.replace(co_filename=str(home / "list_scheduler.py"))
        rebound = types.FunctionType(code, namespace, name, plain.__defaults__)
        flags: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": name != "build"}
        namespace[name] = njit(cache=home is not None, **flags)(rebound)
    build = namespace["build"]
    build.compile((int64[::1],))
    return build  # type: ignore[no-any-return]


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
        return None if makespan == st.NONE else self.times(makespan)
