"""The interface of a codec."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Copies between a device buffer and a host buffer, both flat ``uint8`` tensors.

    Both calls run on a lane and must not block the host on a GPU (``non_blocking`` copies).
    """

    name: str
    lossless: bool

    def wire_bytes(self, raw_bytes: int) -> int:
        """Bytes of host buffer that ``raw_bytes`` of device memory need."""

    def encode(self, raw: Tensor, wire: Tensor) -> None:
        """Device ``raw`` (``uint8[raw_bytes]``) into host ``wire`` (``uint8[wire_bytes]``)."""

    def decode(self, wire: Tensor, raw: Tensor) -> None:
        """The way back; a lossless codec restores every bit."""
