"""Bytes of activations that are really in device memory: each storage once, while it is alive.

Nothing is kept alive here and nobody has to say "freed": a weak reference to the storage tells.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef


class ResidentLedger:
    """Counts storages by liveness; safe to use from several threads."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()

    def add(self, storages: Iterable[UntypedStorage]) -> None:
        """Count these storages from now on until they die; known ones are counted once."""
        with self._lock:
            for storage in storages:
                # The address of a storage is not used again while a weak reference exists.
                known = self._alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Count what these tensors hold, for example inputs kept for a later weight gradient."""
        self.add(tensor.untyped_storage() for tensor in tensors)

    def sample(self) -> int:
        """Bytes alive now; remembers the peak of all samples."""
        with self._lock:
            dead = [key for key, (ref, _) in self._alive.items() if ref.expired()]
            for key in dead:
                del self._alive[key]
            now = sum(size for _, size in self._alive.values())
            self.peak_bytes = max(self.peak_bytes, now)
            return now

    def reset_peak(self) -> None:
        """A new iteration: the peak starts from what is alive now."""
        self.peak_bytes = 0
        self.sample()
