"""Streams and events: a CPU runs what it is told at once, so all of them are already done.

What this cannot show: a missing wait. The happens-before checker of the runtime's lanes does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron_optpipe.megatron.cpu.device import CPU
from megatron_optpipe.megatron.replacements import Replacements


class Event:
    """An event that has happened as soon as it is recorded; times by the wall clock."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_ms: float | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._recorded_ms = 1e3 * time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of the two was never recorded (as CUDA does).
        """
        if self._recorded_ms is None or end_event._recorded_ms is None:
            raise RuntimeError("both events must be recorded before the time between them is asked")
        return end_event._recorded_ms - self._recorded_ms

    def query(self) -> bool:
        """Always done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """A stream whose work is always finished."""

    cuda_stream = 0
    device = CPU
    priority = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as CUDA numbers them."""
        return (0, -1)

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Always idle."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None


@contextlib.contextmanager
def _stream_context(stream: Any = None) -> Iterator[Any]:
    yield stream


def stand_in_streams(book: Replacements) -> None:
    """Replace the stream and event classes of ``torch.cuda``, and every function around them."""
    cuda, only = torch.cuda, Stream()
    book.put(cuda, "Event", Event)
    for name in ("Stream", "ExternalStream"):
        book.put(cuda, name, Stream)
    for name in ("stream", "StreamContext"):
        book.put(cuda, name, _stream_context)
    for name in ("current_stream", "default_stream"):
        book.put(cuda, name, lambda *_args, **_kwargs: only)
    for name in ("set_stream", "synchronize"):
        book.put(cuda, name, lambda *_args, **_kwargs: None)
    book.put(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
