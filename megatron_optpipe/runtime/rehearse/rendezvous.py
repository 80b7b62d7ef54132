"""Sends that block until their receive is posted: the harshest rule a backend may have."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_optpipe.core import Message
from megatron_optpipe.runtime.rehearse.actors import HopTransport

_READY_TAG = 2**29


class RendezvousTransport(HopTransport):
    """The receiver says when it has posted; the sender waits for that before it sends."""

    sends_block = True

    def post_receive(self, message: Message) -> None:
        """Start receiving, and tell the sender."""
        super().post_receive(message)
        ready = torch.zeros(1)
        work = self._isend(ready, self._rank_of[message.src], message, _READY_TAG)
        self._sending.append((message, [work], [ready]))

    def send(self, message: Message, tensor: Tensor) -> None:
        """Block until the receive is posted, then send."""
        ready = torch.empty(1)
        work = self._irecv(ready, self._rank_of[message.dst], message, _READY_TAG)
        self._finish(work, "rendezvous", message)
        super().send(message, tensor)


def transport_class(rendezvous: bool) -> type[HopTransport]:
    """The transport of a rehearsal."""
    return RendezvousTransport if rendezvous else HopTransport


__all__ = ["RendezvousTransport", "transport_class"]
