"""Streams and events without a GPU: copies run as late as they may, or by dice.

The compute stream runs what it is given at once. A copy stream queues; it moves only when somebody
waits for one of its events, or when the dice say so. A wait for an event that was never recorded is
no wait on a GPU: here it is an error.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_optpipe.runtime.codecs import Identity
from megatron_optpipe.runtime.saved import Slot


class Gpu:
    """All streams of a test. ``eagerness``: how often a copy stream moves by itself."""

    def __init__(self, eagerness: float, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.current = threading.local()
        self.pending_reads: set[int] = set()
        """Addresses of device memory that a copy still has to read."""
        self.pending_host_reads: dict[int, set[object]] = {}
        """For each host buffer (its address) the copies out of it that have not ended."""
        self.overwrites = 0
        """Copies into a buffer that were issued before the last one out of it had ended."""
        self._eagerness = eagerness
        self._dice = random.Random(seed)

    def step(self) -> None:
        for stream in self.streams:
            while stream.items and self._dice.random() < self._eagerness:
                if not stream.advance():
                    break

    def install(self, patch: pytest.MonkeyPatch) -> None:
        gpu = self

        class BoundStream(Stream):
            def __init__(self, device: object = None) -> None:
                super().__init__(gpu, immediate=False)

        class BoundEvent(Event):
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__(gpu)

        @contextmanager
        def stream(one: Stream) -> Iterator[None]:
            before = gpu.current.stream if hasattr(gpu.current, "stream") else None
            gpu.current.stream = one
            yield
            gpu.current.stream = before

        for name, value in (
            ("Stream", BoundStream),
            ("Event", BoundEvent),
            ("stream", stream),
            ("current_stream", lambda device=None: gpu.current.stream),
            ("set_device", lambda device: None),
        ):
            patch.setattr(torch.cuda, name, value)

        leave = Slot.leave

        def checked_leave(slot: Slot) -> None:
            assert slot.storage is not None
            assert slot.storage.data_ptr() not in gpu.pending_reads, "freed before it was copied"
            leave(slot)

        patch.setattr(Slot, "leave", checked_leave)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream: Stream | None = None
        self.passed = False

    def record(self, stream: Stream | None = None) -> None:
        with self.gpu.lock:
            assert self.stream is None, "recorded twice"
            self.stream = stream or self.gpu.current.stream
            self.stream.put(self)

    def query(self) -> bool:
        with self.gpu.lock:
            self.gpu.step()
            assert self.stream is not None, "asked before it was recorded"
            return self.passed

    def synchronize(self) -> None:
        with self.gpu.lock:
            assert self.stream is not None, "waited for before it was recorded"
            while not self.passed:
                assert self.stream.advance(), "the streams wait for each other"


class Stream:
    def __init__(self, gpu: Gpu, *, immediate: bool) -> None:
        self.gpu = gpu
        self.device = torch.device("cpu")
        self.immediate = immediate
        self.items: deque[Event | tuple[Event] | Callable[[], None]] = deque()
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "a wait for an event that was not recorded is no wait"
        self.put((event,))

    def put(self, item: Event | tuple[Event] | Callable[[], None]) -> None:
        with self.gpu.lock:
            self.items.append(item)
            while self.immediate and self.items:
                assert self.advance(), "the streams wait for each other"
            self.gpu.step()

    def advance(self) -> bool:
        """Do the next item, and what it waits for; whether that was possible."""
        if not self.items:
            return False
        item = self.items[0]
        if isinstance(item, tuple):
            if item[0].stream is not self:
                item[0].synchronize()
            assert item[0].passed
        elif isinstance(item, Event):
            item.passed = True
        else:
            item()
        self.items.popleft()
        return True


class StreamCodec(Identity):
    """Copies when the stream gets there; fresh device memory is full of rubbish until then.

    A write into a host buffer must come after every copy out of it that was issued earlier.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def encode(self, raw: Tensor, wire: Tensor) -> None:
        address = raw.data_ptr()
        self.gpu.pending_reads.add(address)
        with self.gpu.lock:
            pending = self.gpu.pending_host_reads.get(wire.untyped_storage().data_ptr(), set())
            earlier = frozenset(pending)
            self.gpu.overwrites += bool(earlier)

        def copy() -> None:
            assert not earlier & pending, "a host buffer was written before it was read"
            wire.copy_(raw)
            self.gpu.pending_reads.discard(address)

        self.gpu.current.stream.put(copy)

    def decode(self, wire: Tensor, raw: Tensor) -> None:
        raw.fill_(0xA5)
        token = object()
        with self.gpu.lock:
            buffer = wire.untyped_storage().data_ptr()
            pending = self.gpu.pending_host_reads.setdefault(buffer, set())
            pending.add(token)

        def copy() -> None:
            raw.copy_(wire)
            pending.discard(token)

        self.gpu.current.stream.put(copy)
