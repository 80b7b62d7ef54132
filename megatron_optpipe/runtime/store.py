"""The activation store: what F saved, whether it is on the device or on the host, and its bytes.

Around F, ``saving`` collects every tensor that autograd saves; ``offload`` and ``reload`` give the
lanes the copies of one op; around B, ``using`` hands the tensors back and then forgets the op, so
that only what W still holds stays. Each storage moves once however many views of it were saved, and
comes back as new memory under the same views, bit for bit. Parameters never leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from megatron_optpipe.core.op import Op
from megatron_optpipe.runtime.codecs import Codec, Identity
from megatron_optpipe.runtime.host_pool import HostBuffer, HostPool
from megatron_optpipe.runtime.lanes import Event
from megatron_optpipe.runtime.resident import ResidentLedger
from megatron_optpipe.runtime.saved import Handle, OpRecord, Slot, unpack

ALIGN_BYTES = 512
"""Parts of a host buffer start at multiples of this."""

MIN_BYTES = 2048
"""Smaller storages stay on the device: a copy of one costs more than its room."""

Key = tuple[int, int]
"""(stage, microbatch): the F, O, R, B of which belong together."""


class ActivationStore:
    """The activations of one device.

    ``parameters``: tensors whose storages never leave (a ``Parameter`` never does in any case).
    ``ledger`` counts resident bytes, also of what ``count`` is given.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        pool: HostPool | None = None,
        codec: Codec | None = None,
        parameters: Iterable[Tensor] = (),
        min_bytes: int = MIN_BYTES,
        graph_ends_in_b: bool = False,
    ) -> None:
        """``graph_ends_in_b``: W works on tensors that B hands it, not on the graph. Then what is
        left of the graph after B (a loss that somebody still holds, a branch that B did not walk)
        keeps no memory.
        """
        self.device = torch.empty(0, device=device).device
        self.pool = pool or HostPool()
        self.codec: Codec = codec or Identity()
        self.ledger = ResidentLedger()
        self.moved_bytes = 0
        """Wire bytes of all offloads since ``start``."""
        self.freed_bytes = 0
        """Device bytes that those offloads really gave back."""
        self._min_bytes = min_bytes
        self._graph_ends_in_b = graph_ends_in_b
        self._records: dict[Key, OpRecord] = {}
        self._hosted: dict[Key, Hosted] = {}
        self._expected: dict[int, int] = {}
        # The address of a storage is not used again while a weak reference to it exists.
        self._fixed: dict[int, StorageWeakRef] = {}
        self.keep_out(parameters)

    @property
    def resident_bytes(self) -> int:
        """Bytes of activations on the device now, each living storage once."""
        return self.ledger.sample()

    @property
    def peak_bytes(self) -> int:
        """The most that was resident since ``start``, at the ends of ops and reload starts."""
        return self.ledger.peak_bytes

    def start(self) -> None:
        """A new iteration: counters start again; what no B has used is forgotten."""
        self._records.clear()
        self.moved_bytes = 0
        self.freed_bytes = 0
        self.ledger.reset_peak()

    @contextmanager
    def saving(self, op: Op) -> Iterator[None]:
        """Around F ``op``: every tensor that autograd saves inside belongs to it."""
        record = OpRecord(op, self.device, self._may_leave)
        self._records[_key(op)] = record

        def pack(tensor: Tensor) -> Handle:
            return tensor if self._is_fixed(tensor) else record.pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.ledger.add(s.storage for s in record.slots.values() if s.storage is not None)
        self.ledger.sample()

    @contextmanager
    def using(self, op: Op) -> Iterator[None]:
        """Around B ``op``: what its F saved is on the device; afterwards it is forgotten."""
        if _key(op) in self._hosted:
            raise RuntimeError(f"{op} needs activations that are on the host: reload them first")
        # From here on only the graph holds them, so autograd lets go of each while B runs.
        record = self._records.pop(_key(op), None)
        slots: list[weakref.ref[Slot]] = []
        if record is not None and self._graph_ends_in_b:
            slots = [weakref.ref(slot) for slot in record.slots.values()]
        del record
        yield
        for ref in slots:
            slot = ref()
            if slot is not None:
                slot.leave()
        self.drop(op)

    def drop(self, op: Op) -> None:
        """Forget the op; its memory lives on only where a graph or a W still holds it."""
        self._records.pop(_key(op), None)
        hosted = self._hosted.pop(_key(op), None)
        if hosted is not None:
            hosted.give_buffer(self.pool)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as resident activations for as long as they live."""
        self.ledger.add_tensors(tensors)
        self.ledger.sample()

    def keep_out(self, tensors: Iterable[Tensor]) -> None:
        """These belong to somebody else, who keeps them: they are neither counted nor moved."""
        dead = [key for key, ref in self._fixed.items() if ref.expired()]
        for key in dead:
            del self._fixed[key]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._fixed[storage._cdata] = StorageWeakRef(storage)

    def expect(self, buffers_of_stage: Mapping[int, int]) -> None:
        """How many microbatches of each stage may be on the host at once (``host_buffers``).

        The first offload of a stage, which shows the size, then gets the room for all.
        """
        self._expected.update(buffers_of_stage)

    def offload(self, op: Op) -> Offload:
        """The transfer of O ``op``; what it moves is looked up when it runs."""
        return Offload(self, op)

    def reload(self, op: Op) -> Reload:
        """The transfer of R ``op``."""
        return Reload(self, op)

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or a view of one."""
        if isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter):
            return True
        if not self._fixed or type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._fixed

    def _may_leave(self, storage: UntypedStorage) -> bool:
        return storage.nbytes() >= self._min_bytes


class Hosted:
    """What one offload has put on the host: the slots and where each lies in the buffer."""

    __slots__ = ("buffer", "parts")

    def __init__(self, buffer: HostBuffer, parts: Sequence[tuple[Slot, Tensor]]) -> None:
        self.buffer: HostBuffer | None = buffer
        self.parts = tuple(parts)

    def give_buffer(self, pool: HostPool, ended: Event | None = None) -> None:
        """Return the buffer, unless that has been done; ``ended``: the last copy out of it."""
        if self.buffer is not None:
            pool.give(self.buffer, ended)
            self.buffer = None


class Offload:
    """Device to host, for one (stage, microbatch)."""

    def __init__(self, store: ActivationStore, op: Op) -> None:
        self._store = store
        self._op = op
        self._hosted: Hosted | None = None

    def allocate(self) -> list[Event]:
        """Take a host buffer; raises ``HostMemoryError`` where there is no room."""
        store = self._store
        record = store._records.get(_key(self._op))
        if record is None:
            raise RuntimeError(f"{self._op}: nothing was saved for it, its F has not run")
        # What was emptied after it was saved is to be computed again into that very storage.
        leaving = [
            s
            for s in record.slots.values()
            if s.may_leave and s.storage is not None and s.storage.nbytes() == s.num_bytes
        ]
        sizes = [store.codec.wire_bytes(slot.num_bytes) for slot in leaving]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // ALIGN_BYTES) * ALIGN_BYTES)
        expected = store._expected.pop(self._op.stage, 0)
        store.pool.reserve(offsets[-1], expected)
        buffer = store.pool.take(offsets[-1])
        wires = [buffer.data[at : at + size] for at, size in zip(offsets, sizes)]
        self._hosted = Hosted(buffer, list(zip(leaving, wires)))
        store.moved_bytes += sum(sizes)
        return [] if buffer.busy_until is None else [buffer.busy_until]

    def copy(self) -> None:
        """Issue the copies."""
        assert self._hosted is not None
        for slot, wire in self._hosted.parts:
            assert slot.storage is not None
            self._store.codec.encode(_raw(slot.storage), wire)

    def issued(self, ended: Event) -> None:
        """Nothing yet: device memory goes back on the compute lane, in ``release``."""

    def release(self, ended: Event) -> None:
        """Let go of the device memory."""
        assert self._hosted is not None
        watched = []
        for slot, _ in self._hosted.parts:
            assert slot.storage is not None
            watched.append((StorageWeakRef(slot.storage), slot.num_bytes))
            slot.leave()
        self._store._hosted[_key(self._op)] = self._hosted
        # A lane may hold this job until its next one; the slots must not live that long.
        self._hosted = None
        self._store.freed_bytes += sum(size for ref, size in watched if ref.expired())


class Reload:
    """Host to device, for one (stage, microbatch)."""

    def __init__(self, store: ActivationStore, op: Op) -> None:
        self._store = store
        self._op = op
        self._fresh: list[UntypedStorage] = []

    def allocate(self) -> list[Event]:
        """Take device memory, one allocation a storage, so that each can be freed by itself."""
        store = self._store
        self._fresh = [
            torch.empty(slot.num_bytes, dtype=torch.uint8, device=store.device).untyped_storage()
            for slot, _ in self._take().parts
        ]
        store.ledger.add(self._fresh)
        store.ledger.sample()
        return []

    def copy(self) -> None:
        """Issue the copies."""
        for (_, wire), storage in zip(self._take().parts, self._fresh):
            self._store.codec.decode(wire, _raw(storage))

    def issued(self, ended: Event) -> None:
        """The host buffer may be used again, behind ``ended``."""
        self._take().give_buffer(self._store.pool, ended)

    def release(self, ended: Event) -> None:
        """Put the memory under the saved views; the host buffer goes back if it has not yet."""
        hosted = self._take()
        for (slot, _), storage in zip(hosted.parts, self._fresh):
            slot.storage = storage
        self._fresh = []
        del self._store._hosted[_key(self._op)]
        hosted.give_buffer(self._store.pool, ended)

    def _take(self) -> Hosted:
        hosted = self._store._hosted.get(_key(self._op))
        if hosted is None:
            raise RuntimeError(f"{self._op}: nothing is on the host for it, its O has not run")
        return hosted


def _key(op: Op) -> Key:
    return (op.stage, op.microbatch)


def _raw(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage as a flat ``uint8`` tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
