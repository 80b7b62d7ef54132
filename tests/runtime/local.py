"""All devices of a plan as threads of one process: transport by dictionary, real lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_optpipe.core import Message, Op, Program
from megatron_optpipe.runtime.abort import Abort
from megatron_optpipe.runtime.executor import Executor


class Net:
    """What lies between the devices."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: set[Message] = set()
        self.sent: dict[Message, Tensor] = {}
        self.ended: set[Op] = set()
        self.abort = Abort()
        self.abort.on_fault(self._wake)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: true() or self.abort.fault is not None, 20.0):
                raise TimeoutError("the test is stuck")
        self.abort.check()

    def tell(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()


class LocalTransport:
    def __init__(self, net: Net, *, rendezvous: bool = False) -> None:
        self.net = net
        self.sends_block = rendezvous

    def post_receive(self, message: Message) -> None:
        self.net.tell(lambda: self.net.posted.add(message))

    def receive(self, message: Message) -> Tensor:
        assert message in self.net.posted
        self.net.until(lambda: message in self.net.sent)
        return self.net.sent.pop(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        if self.sends_block:
            self.net.until(lambda: message in self.net.posted)
        copy = tensor.clone()
        self.net.tell(lambda: self.net.sent.update({message: copy}))

    def finish(self) -> None:
        pass


class LocalTurns:
    def __init__(self, net: Net) -> None:
        self.net = net

    def begin(self) -> None:
        pass

    def wait(self, op: Op) -> None:
        self.net.until(lambda: op in self.net.ended)

    def signal(self, op: Op) -> None:
        self.net.tell(lambda: self.net.ended.add(op))


class TokenHandlers:
    """Model-free handlers: every op passes a token on."""

    def __init__(self, last_stage: int) -> None:
        self.last_stage = last_stage

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        assert (received is None) == (op.stage == 0)
        return None if op.stage == self.last_stage else torch.tensor([op.stage, op.microbatch])

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        assert (received is None) == (op.stage == self.last_stage)
        return None if op.stage == 0 else torch.tensor([op.stage, op.microbatch])

    def backward_weight(self, op: Op) -> None:
        pass


def run_threads(executors: Sequence[Executor], net: Net) -> list[BaseException]:
    """Run one iteration of all; the exceptions that came out of ``run``, in device order."""
    failures: dict[int, BaseException] = {}

    def run(executor: Executor) -> None:
        try:
            executor.run()
        except BaseException as failure:
            failures[executor.program.device] = failure

    threads = [threading.Thread(target=run, args=(e,), daemon=True) for e in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30.0)
        assert not thread.is_alive(), "a device did not end"
    net.posted.clear()
    net.sent.clear()
    net.ended.clear()
    return [failures[d] for d in sorted(failures)]


def without_wait(program: Program, op: Op, first: Op) -> Program:
    waits = dict(program.waits)
    waits[op] = tuple(w for w in waits[op] if w != first)
    return replace(program, waits=waits)
