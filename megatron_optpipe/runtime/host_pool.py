"""Host memory for offloaded activations: few large buffers, reused over iterations.

One buffer holds all that one O op moves. A returned buffer is given to the next offload that fits
it well; the pool grows only when none does. Pinned memory is registered at its exact size, since
torch's own pinned allocator rounds up to powers of two. Sizes are reported as requested (what
offloads asked for at the worst moment) and reserved (what the pool holds and the budget counts).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.runtime.lanes import Event

MAX_WASTE = 1.25
"""A free buffer serves a request if it is at most this many times as large."""


class HostMemoryError(OptPipeError):
    """The host has no room for an offload."""


@dataclass(eq=False, slots=True)
class HostBuffer:
    """A flat ``uint8`` host tensor; ``busy_until`` is the end of its last copy to the device."""

    data: Tensor
    requested_bytes: int = 0
    busy_until: Event | None = field(default=None, repr=False)


class HostPool:
    """The buffers of one device; safe to use from several lanes.

    ``pin`` page-locks a fresh tensor (``None``: pageable memory, for devices without DMA).
    ``budget_bytes`` bounds what is reserved (``None``: no bound).
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        pin: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.peak_requested_bytes = 0
        self._requested_bytes = 0
        self._pin = pin
        self._free: list[HostBuffer] = []
        self._count = 0
        self._lock = threading.Lock()

    @property
    def num_buffers(self) -> int:
        """How many buffers the pool has made."""
        return self._count

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of at least ``num_bytes``. Raises ``HostMemoryError`` naming the numbers."""
        with self._lock:
            buffer = self._fitting(num_bytes) or self._grow(num_bytes)
            buffer.requested_bytes = num_bytes
            self._requested_bytes += num_bytes
            self.peak_requested_bytes = max(self.peak_requested_bytes, self._requested_bytes)
            return buffer

    def give(self, buffer: HostBuffer, busy_until: Event | None = None) -> None:
        """Return a buffer; its next user waits for ``busy_until``."""
        with self._lock:
            self._requested_bytes -= buffer.requested_bytes
            buffer.requested_bytes = 0
            buffer.busy_until = busy_until
            self._free.append(buffer)

    def reserve(self, num_bytes: int, count: int) -> None:
        """Make ``count`` more buffers of ``num_bytes``, as far as the budget allows.

        Called once a size is known, so that no later iteration has to grow the pool.
        """
        with self._lock:
            for _ in range(count):
                after = self.reserved_bytes + num_bytes
                if self.budget_bytes is not None and after > self.budget_bytes:
                    return
                self._free.append(self._grow(num_bytes))

    def _fitting(self, num_bytes: int) -> HostBuffer | None:
        fits = [b for b in self._free if num_bytes <= b.data.numel() <= MAX_WASTE * num_bytes]
        if not fits:
            return None
        # The smallest that fits; among equals the one that was returned first, so that the copy
        # it may still be in has had the longest time to end.
        best = min(fits, key=lambda b: b.data.numel())
        self._free.remove(best)
        return best

    def _grow(self, num_bytes: int) -> HostBuffer:
        after = self.reserved_bytes + num_bytes
        if self.budget_bytes is not None and after > self.budget_bytes:
            raise HostMemoryError(
                f"host memory for offloaded activations: {after} bytes needed, the budget is "
                f"{self.budget_bytes} ({self.reserved_bytes} are in use); raise the budget or "
                "make a plan with a smaller host_memory_bytes"
            )
        kind = "pinned host memory" if self._pin is not None else "host memory"
        try:
            data = torch.empty(num_bytes, dtype=torch.uint8)
            if self._pin is not None:
                self._pin(data)
        except (RuntimeError, MemoryError, OSError) as failure:
            cause = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
            raise HostMemoryError(
                f"{kind}: could not get buffer {self._count + 1} of {num_bytes} bytes "
                f"({self.reserved_bytes} are reserved already): {cause}; raise the container's "
                "memory and memlock limits (ulimit -l) or plan with a smaller host_memory_bytes"
            ) from failure
        self.reserved_bytes = after
        self._count += 1
        return HostBuffer(data)


def pin_exactly(data: Tensor) -> None:
    """Page-lock the memory of ``data`` where it lies, at its exact size (CUDA only)."""
    status = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister failed with status {int(status)}")
