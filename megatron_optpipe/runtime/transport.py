"""Messages between pipeline ranks: the output of an F forwards, of a B backwards."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_optpipe.core.program import Message


class PeerLost(RuntimeError):
    """A connection to another rank broke, or nothing came for too long."""


class Transport(Protocol):
    """What the executor needs; one object a rank, used from the compute thread only.

    Both ranks of a pair issue their messages, of both directions, in the same order
    (``core.program.lower``), so an implementation may match them by order alone.
    """

    @property
    def sends_block(self) -> bool:
        """Whether ``send`` returns only once the receive is posted (rendezvous)."""

    def post_receive(self, message: Message) -> None:
        """Start receiving; never blocks."""

    def receive(self, message: Message) -> Tensor:
        """Wait for a message whose receive was posted, and take it. Raises ``PeerLost``."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send; the tensor is kept alive until the send is done. Raises ``PeerLost``."""

    def finish(self) -> None:
        """Wait until all sends are done. Raises ``PeerLost``."""
