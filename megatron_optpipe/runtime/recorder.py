"""What really happened in one iteration, in the shape of a plan.

Times are wall times in ms since ``start``; each op is begun and ended on the thread (or stream)
that runs it. ``Recording`` is the interface that lanes and executor use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from megatron_optpipe.core.op import Op

SCHEMA = "optpipe.measurement/1"


class Recording(Protocol):
    """Sees every op begin and end."""

    def begin(self, op: Op) -> None:
        """``op`` starts now."""

    def end(self, op: Op) -> None:
        """``op`` has ended."""


class Recorder:
    """Wall times of every op of one device and one iteration, and the bytes that were held.

    Not for asynchronous devices: there, marks in the stream are needed (``cuda_lanes``).
    """

    def __init__(self, device: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.peak_bytes: int | None = None
        self.moved_bytes: int | None = None
        self.times_ms: dict[Op, tuple[float, float]] = {}
        self._clock = clock
        self._zero_s = clock()
        self._open: dict[Op, float] = {}

    def start(self, zero_s: float | None = None) -> None:
        """A new iteration: forget the last one; time zero is ``zero_s`` or now."""
        self.times_ms.clear()
        self._open.clear()
        self._zero_s = self._clock() if zero_s is None else zero_s

    def begin(self, op: Op) -> None:
        """``op`` starts now."""
        self._open[op] = self._clock()

    def end(self, op: Op) -> None:
        """``op`` has ended."""
        began, ended = self._open.pop(op), self._clock()
        self.times_ms[op] = ((began - self._zero_s) * 1e3, (ended - self._zero_s) * 1e3)

    @property
    def span_ms(self) -> tuple[float, float]:
        """First start and last end of a compute op; zeros where nothing ran."""
        compute = [t for op, t in self.times_ms.items() if op.kind in "FBW"]
        if not compute:
            return (0.0, 0.0)
        return (min(begin for begin, _ in compute), max(end for _, end in compute))

    def to_dict(self) -> dict[str, Any]:
        """Lanes as lists of ``[kind, stage, microbatch, start_ms, end_ms]`` in order of start."""
        lanes: dict[str, list[list[Any]]] = {"compute": [], "offload": [], "reload": []}
        names = {"O": "offload", "R": "reload"}
        for op, (begin, end) in sorted(self.times_ms.items(), key=lambda entry: entry[1]):
            lanes[names.get(op.kind, "compute")].append([*op, round(begin, 6), round(end, 6)])
        document: dict[str, Any] = {"schema": SCHEMA, "device": self.device, **lanes}
        if self.peak_bytes is not None:
            document["peak_bytes"] = self.peak_bytes
        if self.moved_bytes is not None:
            document["moved_bytes"] = self.moved_bytes
        return document

    def to_json(self) -> str:
        """The document as one line."""
        return json.dumps(self.to_dict(), separators=(",", ":")) + "\n"
