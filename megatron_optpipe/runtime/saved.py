"""What autograd saves for one op: storages held once, views made again on demand.

``saved_tensors_hooks`` hand every saved tensor to ``OpRecord.pack``. A tensor that may leave the
device is kept as a description of its view (dtype, size, strides, offset) and a ``Slot``, one slot
for each storage; ``unpack`` builds the same view again over whatever memory the slot holds then.
Any other tensor is kept as it is. Handles keep their slots alive, as autograd's graph keeps its
tensors, so memory lives exactly as long as the graph (or the view that a W still holds) does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_optpipe.core.op import Op


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """One storage: on the device (``storage``), or on its way there and back (``None``)."""

    op: Op
    storage: UntypedStorage | None
    num_bytes: int
    may_leave: bool
    originals: list[tuple[Tensor, int]] = field(default_factory=list)
    """Each saved tensor, detached, and its version; empty once the storage has left.

    They share autograd's version counter with what was saved: hooks switch autograd's own check
    for writes in place off, and a copy would hide such a write altogether.
    """
    written: set[int] = field(default_factory=set)
    """Saved tensors that had been written in place by the time the storage left."""

    def require_unwritten(self, place: int) -> None:
        """Raise ``RuntimeError`` if saved tensor ``place`` was written in place since."""
        if place in self.written or self._is_written(place):
            raise RuntimeError(
                f"a tensor that {self.op} saved for backward was written in place afterwards: "
                "make that operation of the model out of place"
            )

    def leave(self) -> None:
        """Let go of the device memory."""
        self.written = {i for i in range(len(self.originals)) if self._is_written(i)}
        self.originals.clear()
        self.storage = None

    def _is_written(self, place: int) -> bool:
        if not self.originals:
            return False
        tensor, version = self.originals[place]
        return tensor._version != version


class View(NamedTuple):
    """A saved tensor as a view of a slot."""

    slot: Slot
    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The same view over the slot's memory of now. Raises ``RuntimeError`` if it is away."""
        slot = self.slot
        if slot.storage is None:
            raise RuntimeError(
                f"activations of {slot.op} were used while on the host: no reload came before"
            )
        slot.require_unwritten(self.place)
        if slot.originals:
            return slot.originals[self.place][0]
        empty = torch.empty(0, dtype=self.dtype, device=slot.storage.device)
        return empty.set_(slot.storage, self.offset, self.size, self.stride)


@dataclass(slots=True)
class Wrapped:
    """A saved tensor that wraps others (an FP8 tensor: data and scales), taken apart."""

    subclass: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The wrapper again, around the unpacked inner tensors."""
        inner = {name: unpack(handle) for name, handle in self.inner.items()}
        rebuilt: Tensor = self.subclass.__tensor_unflatten__(
            inner, self.context, self.size, self.stride
        )
        return rebuilt


Handle = Tensor | View | Wrapped


def unpack(handle: Handle) -> Tensor:
    """The tensor that ``OpRecord.pack`` was given, bit for bit."""
    return handle if isinstance(handle, Tensor) else handle.tensor()


@dataclass(slots=True)
class OpRecord:
    """All that autograd saved during one F."""

    op: Op
    device: torch.device
    may_leave: Callable[[UntypedStorage], bool]
    """Whether a storage may be offloaded at all (parameters may not)."""
    slots: dict[int, Slot] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Handle:
        """What autograd keeps in place of ``tensor``."""
        if type(tensor) is not Tensor:
            if not is_traceable_wrapper_subclass(tensor):
                return tensor
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.pack(getattr(tensor, name)) for name in names}
            return Wrapped(type(tensor), inner, context, tensor.size(), tensor.stride())
        if not self._is_plain(tensor):
            # Detached: a saved output that kept its own graph would be a reference cycle.
            return tensor.detach()
        storage = tensor.untyped_storage()
        slot = self.slots.get(storage._cdata)
        if slot is None:
            slot = Slot(self.op, storage, storage.nbytes(), self.may_leave(storage))
            self.slots[storage._cdata] = slot
        slot.originals.append((tensor.detach(), tensor._version))
        place, offset = len(slot.originals) - 1, int(tensor.storage_offset())
        return View(slot, place, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _is_plain(self, tensor: Tensor) -> bool:
        """Whether the tensor is nothing but a strided view of bytes on the device."""
        return (
            tensor.layout == torch.strided
            and tensor.device == self.device
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor.is_inference()
            and tensor.untyped_storage().nbytes() > 0
        )
