"""What stands in for a model: handlers that hold memory and sleep, and messages that take time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_optpipe.core import Message, Op, Problem
from megatron_optpipe.runtime.group_transport import GroupTransport, MessageSpec, WrongMessage
from megatron_optpipe.runtime.rehearse.clock import now_s, sleep_until
from megatron_optpipe.runtime.rehearse.pieces import Pieces
from megatron_optpipe.runtime.store import ActivationStore

TOKEN = MessageSpec((3,), torch.int64)
"""What a message carries: stage and microbatch of its producer, and when it was sent (ns)."""


class _Saver(torch.autograd.Function):
    """Makes autograd save ``held`` (so that the store sees them) and pass a token on."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, back: list[Tensor], *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        ctx.back = back
        ctx.num_held = len(held)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.back.extend(ctx.saved_tensors)
        return (grads[0], None, *([None] * ctx.num_held))


class SleepingHandlers:
    """Every op lasts its planned time from the moment it is called; activations are real memory.

    ``fail_at``: raise in that op instead (to try out what a failure does).
    """

    def __init__(
        self,
        problem: Problem,
        store: ActivationStore,
        *,
        scale: float,
        byte_scale: float,
        fail_at: Op | None = None,
    ) -> None:
        self._problem = problem
        self._store = store
        self._scale = scale
        self._pieces = [Pieces.of(stage, byte_scale) for stage in problem.stages]
        self._fail_at = fail_at
        self._anchor = torch.zeros((), requires_grad=True)
        self._graphs: dict[tuple[int, int], tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        """Take the activations of the microbatch."""
        ends = self._enter(op, received)
        pieces = self._pieces[op.stage]
        moved = [_filled(n, op) for n in (pieces.moved_freed, pieces.moved_kept)]
        stays = [_filled(n, op) for n in (pieces.stays_freed, pieces.stays_kept)]
        back: list[Tensor] = []
        root = _Saver.apply(self._anchor, back, *moved)
        self._store.count(stays)
        self._graphs[op.stage, op.microbatch] = (root, back, stays)
        del moved, stays
        sleep_until(ends)
        return None if op.stage == self._problem.num_stages - 1 else _token(op)

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        """Use the activations, and keep what W needs of them."""
        ends = self._enter(op, received)
        root, back, stays = self._graphs.pop((op.stage, op.microbatch))
        torch.autograd.backward(root)
        for tensor in (*back, *stays):
            _require_stamp(tensor, op)
        pieces = self._pieces[op.stage]
        kept = [back[1], stays[1]]
        if pieces.backward_takes:
            kept.append(_filled(pieces.backward_takes, op))
            self._store.count(kept[-1:])
        self._kept[op.stage, op.microbatch] = kept
        del root, back, stays, tensor
        sleep_until(ends)
        return None if op.stage == 0 else _token(op)

    def backward_weight(self, op: Op) -> None:
        """Give the rest back."""
        ends = self._enter(op, None)
        for tensor in self._kept.pop((op.stage, op.microbatch)):
            _require_stamp(tensor, op)
        sleep_until(ends)

    def _enter(self, op: Op, received: Tensor | None) -> float:
        """Check the input; the moment at which the op ends."""
        began = now_s()
        if op == self._fail_at:
            raise RuntimeError("this op was told to fail")
        if received is not None:
            stage = op.stage - 1 if op.kind == "F" else op.stage + 1
            if received[:2].tolist() != [stage, op.microbatch]:
                raise RuntimeError(f"{op} got the output of {received.tolist()}")
        return began + self._problem.duration_ms(op) * self._scale * 1e-3


class HopTransport(GroupTransport):
    """Messages arrive once the plan's hop has passed since they were sent, not earlier."""

    def __init__(self, problem: Problem, scale: float, device: int) -> None:
        super().__init__(device, range(problem.num_devices), lambda _: TOKEN)
        self._hop_s = [
            problem.hop_ms(src, device) * scale * 1e-3 for src in range(problem.num_devices)
        ]

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send with the time of now."""
        tensor[2] = int(now_s() * 1e9)
        super().send(message, tensor)

    def receive(self, message: Message) -> Tensor:
        """Wait for the message and for the moment of its arrival."""
        tensor = super().receive(message)
        stage, microbatch, sent_ns = tensor.tolist()
        if (stage, microbatch) != (message.stage, message.microbatch):
            raise WrongMessage(f"waited for {message} and got that of {stage}, {microbatch}")
        sleep_until(sent_ns * 1e-9 + self._hop_s[message.src])
        return tensor


def _token(op: Op) -> Tensor:
    return torch.tensor([op.stage, op.microbatch, 0], dtype=torch.int64)


def _stamp(op: Op) -> int:
    return (op.stage * 31 + op.microbatch * 7 + 1) % 251


def _filled(num_bytes: int, op: Op) -> Tensor:
    """Fresh memory that says at both ends whose it is."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        memory[0] = memory[-1] = _stamp(op)
    return memory


def _require_stamp(tensor: Tensor, op: Op) -> None:
    if tensor.numel() and not int(tensor[0]) == int(tensor[-1]) == _stamp(op):
        raise RuntimeError(f"{op} found the activations of another op, or stale ones")
