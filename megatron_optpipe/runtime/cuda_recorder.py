"""The recorder for CUDA: marks in the streams, read after the iteration.

An op begins and ends where the stream that runs it gets there, not where the host issues it, and
nothing is waited for while the iteration runs.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_optpipe.core.op import Op
from megatron_optpipe.runtime.recorder import Recorder


class CudaRecorder(Recorder):
    """Times of every op of one device and one iteration, in ms since ``start``."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._zero = _mark()
        self._marks: dict[Op, tuple[torch.cuda.Event, torch.cuda.Event | None]] = {}

    def start(self, zero_s: float | None = None) -> None:
        """A new iteration; time zero is where the current stream is now."""
        super().start(zero_s)
        self._marks.clear()
        self._zero = _mark()

    def begin(self, op: Op) -> None:
        """``op`` starts where the current stream is."""
        self._marks[op] = (_mark(), None)

    def end(self, op: Op) -> None:
        """``op`` ends where the current stream is."""
        self._marks[op] = (self._marks[op][0], _mark())

    def read(self) -> None:
        """Wait for the device and turn the marks into ``times_ms``."""
        torch.cuda.synchronize()
        for op, (began, ended) in self._marks.items():
            if ended is not None:
                self.times_ms[op] = (
                    float(self._zero.elapsed_time(began)),
                    float(self._zero.elapsed_time(ended)),
                )

    def to_dict(self) -> dict[str, Any]:
        """As ``Recorder``; reads the marks first."""
        self.read()
        return super().to_dict()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream())
    return event
