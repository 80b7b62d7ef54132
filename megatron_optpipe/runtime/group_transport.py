"""Transport over a torch process group: gloo (by tag and order) or NCCL (by order).

Sends and receives are asynchronous. On gloo a wait blocks the calling thread; on NCCL it makes the
current stream wait. A pipeline of two devices, where both neighbours are one peer, needs nothing
special: every message has its own tag, and both ranks issue them in one order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.program import Message, Program, Recv, Send
from megatron_optpipe.runtime.transport import PeerLost

STALL_S = 600.0
"""A receive that takes longer than this is a stall."""

SENDS_IN_FLIGHT = 4
"""A send waits for the one this many before it: finished sends hold memory until waited for.

Waiting here is safe however slow a peer is: programs end even if every send blocks.
"""

_INTERRUPT_TAG = 2**30


class MessageSpec(NamedTuple):
    """What a message carries: known to both ends before it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WrongMessage(RuntimeError):
    """A message arrived in another's place (only seen where messages are stamped)."""


class GroupTransport:
    """``Transport`` of plan device ``device``, over ``group``.

    ``rank_of[d]``: global rank of plan device d. ``spec_of(message)``: its shape and dtype.
    ``stamped``: every message follows a small header that names it and is checked on arrival.
    """

    sends_block = False

    def __init__(
        self,
        device: int,
        rank_of: Sequence[int],
        spec_of: Callable[[Message], MessageSpec],
        *,
        group: dist.ProcessGroup | None = None,
        torch_device: torch.device | str = "cpu",
        stall_s: float = STALL_S,
        stamped: bool = False,
    ) -> None:
        self.device = device
        self._rank_of = tuple(rank_of)
        self._spec_of = spec_of
        self._group = group
        self._torch_device = torch.device(torch_device)
        self._stall = timedelta(seconds=stall_s)
        self._stamped = stamped
        self._blocks_host = dist.get_backend(group) == "gloo"
        self._posted: dict[Message, tuple[list[dist.Work], list[Tensor]]] = {}
        self._sending: deque[tuple[Message, list[dist.Work], list[Tensor]]] = deque()

    def warm_up(self, programs: Sequence[Program]) -> None:
        """Open every pair that ``programs`` use, in one order that is the same on all ranks.

        Backends make the connection of a pair at its first use; made in plan order, two ranks
        could each wait for the other's other connection.
        """
        for low, high in used_pairs(programs):
            if self.device not in (low, high):
                continue
            token = torch.zeros(1, device=self._torch_device)
            first, second = (dist.send, dist.recv) if self.device == low else (dist.recv, dist.send)
            peer = self._rank_of[high if self.device == low else low]
            first(token, peer, self._group)
            second(token, peer, self._group)
        if self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)

    def post_receive(self, message: Message) -> None:
        """Start receiving into fresh memory."""
        spec = self._spec_of(message)
        parts = [torch.empty(spec.shape, dtype=spec.dtype, device=self._torch_device)]
        if self._stamped:
            size = len(_header(message))
            parts.insert(0, torch.empty(size, dtype=torch.int64, device=self._torch_device))
        peer = self._rank_of[message.src]
        self._posted[message] = ([self._irecv(part, peer, message) for part in parts], parts)

    def receive(self, message: Message) -> Tensor:
        """Wait for a posted message. Raises ``PeerLost``; ``WrongMessage`` if the stamp differs."""
        works, parts = self._posted.pop(message)
        for work in works:
            self._finish(work, "receive", message)
        if self._stamped:
            self.arrived(message, parts[0])
        return parts[-1]

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; the tensor lives until the send is done."""
        spec, peer = self._spec_of(message), self._rank_of[message.dst]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise RuntimeError(
                f"{message}: the output is {tuple(tensor.shape)} {tensor.dtype}, the receiver "
                f"expects {spec.shape} {spec.dtype}; make all microbatches one shape"
            )
        parts = [tensor.contiguous()]
        if self._stamped:
            header = torch.tensor(_header(message), dtype=torch.int64, device=self._torch_device)
            parts.insert(0, header)
        works = [self._isend(part, peer, message) for part in parts]
        self._sending.append((message, works, parts))
        while self._sending and self._is_over(*self._sending[0][:2]):
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until all sends are done."""
        while self._sending:
            message, works, _ = self._sending.popleft()
            for work in works:
                self._finish(work, "send", message)

    def interrupt(self) -> None:
        """From any thread: make whoever waits in this transport raise ``PeerLost``.

        Terminal: the group cannot be used afterwards. Gloo breaks all connections of a group when
        one of its waits times out, so a receive that nobody answers is posted and not waited for.
        """
        group = self._group if self._group is not None else dist.group.WORLD
        if group is None:
            return
        if not self._blocks_host:
            group.abort()
            return
        peers = [rank for rank in self._rank_of if rank != self._rank_of[self.device]]
        if peers:
            try:
                work = dist.irecv(torch.empty(1), peers[0], self._group, _INTERRUPT_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # what it is for

    def arrived(self, message: Message, header: Tensor) -> None:
        """Check the stamp of a message. Raises ``WrongMessage``."""
        kind, stage, microbatch = (int(x) for x in header[:3])
        found = Op("FB"[kind], stage, microbatch)
        if found != message.producer:
            raise WrongMessage(f"waited for {message.producer} and got {found}")

    def _is_over(self, message: Message, works: list[dist.Work]) -> bool:
        """Whether the oldest send is done; waits for it where too many are behind it."""
        if self._blocks_host:  # gloo only knows once it has waited
            if len(self._sending) <= SENDS_IN_FLIGHT:
                return False
            for work in works:
                self._finish(work, "send", message)
            return True
        return all(work.is_completed() for work in works)

    def _finish(self, work: dist.Work, what: str, message: Message) -> None:
        began = time.monotonic()
        try:
            if self._blocks_host:
                work.wait(self._stall)
            else:
                work.wait()
        except RuntimeError as failure:
            waited_s = time.monotonic() - began
            raise PeerLost(
                f"{what} of {message} failed after {waited_s:.1f} s: {str(failure).splitlines()[0]}"
            ) from failure

    def _irecv(self, tensor: Tensor, peer: int, message: Message, tag: int = 0) -> dist.Work:
        try:
            return _started(dist.irecv(tensor, peer, self._group, tag | _tag(message)))
        except RuntimeError as failure:
            raise PeerLost(f"receive of {message} failed: {failure}") from failure

    def _isend(self, tensor: Tensor, peer: int, message: Message, tag: int = 0) -> dist.Work:
        try:
            return _started(dist.isend(tensor, peer, self._group, tag | _tag(message)))
        except RuntimeError as failure:
            raise PeerLost(f"send of {message} failed: {failure}") from failure


def used_pairs(programs: Sequence[Program]) -> list[tuple[int, int]]:
    """The pairs of devices that exchange messages, lower first, in one global order."""
    pairs = {
        (min(item.message.src, item.message.dst), max(item.message.src, item.message.dst))
        for program in programs
        for item in program.items
        if isinstance(item, Send | Recv)
    }
    return sorted(pairs)


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not a member of the pipeline group")
    return work


def _tag(message: Message) -> int:
    """One tag a message: messages of one tag (a header and its payload) keep their order."""
    return (message.stage << 16 | message.microbatch) << 1 | (message.kind == "B")


def _header(message: Message) -> list[int]:
    """The stamp: which message this is, and when it was sent (ns, this machine's clock)."""
    return ["FB".index(message.kind), message.stage, message.microbatch, time.monotonic_ns()]
