"""Execute a lowered plan on one device: op kind to handler, items in program order.

The executor follows orders and dependencies, not clocks. Where it stands in the chain: a plan is
lowered to one ``Program`` a device (``core.program``); this walks its items on the compute thread,
hands O and R ops to the lanes as soon as everything they wait for has been issued, and makes the
compute wait where the program says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.program import Compute, Message, Program, Recv, Send
from megatron_optpipe.runtime.abort import Abort
from megatron_optpipe.runtime.faults import RuntimeFault, describe
from megatron_optpipe.runtime.host_need import host_buffers
from megatron_optpipe.runtime.host_times import HostTimes
from megatron_optpipe.runtime.lanes import Event, Job, Lanes, Transfer
from megatron_optpipe.runtime.recorder import Recording
from megatron_optpipe.runtime.transport import PeerLost, Transport

PEER_NOTE_S = 5.0
"""After a lost connection: how long to wait for the note that says why."""


class Handlers(Protocol):
    """What the model does for each kind of compute op."""

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        """Run F. ``received``: output of the previous stage, detached (``None`` for stage 0).

        Returns the output for the next stage (``None`` for the last stage).
        """

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        """Run B. ``received``: gradient of this stage's output (``None`` for the last stage).

        Returns the gradient of this stage's input (``None`` for stage 0).
        """

    def backward_weight(self, op: Op) -> None:
        """Run W: the weight gradients that B left to do."""


class Store(Protocol):
    """The part of ``store.ActivationStore`` that the executor uses."""

    def saving(self, op: Op) -> AbstractContextManager[None]:
        """Around F: collect what autograd saves."""

    def using(self, op: Op) -> AbstractContextManager[None]:
        """Around B: hand back what was saved, and drop it at the end."""

    def expect(self, buffers_of_stage: Mapping[int, int]) -> None:
        """How many microbatches of each stage may be on the host at once."""

    def offload(self, op: Op) -> Transfer:
        """The copy to the host of O op ``op``."""

    def reload(self, op: Op) -> Transfer:
        """The copy back of R op ``op``."""


class Executor:
    """Runs one iteration of ``program`` each time ``run`` is called.

    ``recorder`` sees compute ops here and O and R ops from the lanes, ``abort`` makes a fault of
    one rank everyone's; give the lanes the same ones. Raises ``RuntimeFault`` naming rank, op and
    position for whatever goes wrong; a rank that stops because another failed raises ``Aborted``
    with the other's message.
    """

    def __init__(
        self,
        program: Program,
        handlers: Handlers,
        transport: Transport,
        lanes: Lanes,
        store: Store,
        recorder: Recording | None = None,
        abort: Abort | None = None,
    ) -> None:
        self.program = program
        self.times = HostTimes()
        self._transport = transport
        self._lanes = lanes
        self._store = store
        self._recorder = recorder
        self._abort = abort or Abort()
        self._handlers: dict[str, Callable[[Op], None]] = {
            "F": lambda op: self._forward(handlers, op),
            "B": lambda op: self._backward_input(handlers, op),
            "W": lambda op: self._backward_weight(handlers, op),
        }
        store.expect(host_buffers(program))
        self._compute_ops = [item.op for item in program.items if isinstance(item, Compute)]
        self._place = {op: i for i, op in enumerate(self._compute_ops)}
        self._own = {*self._compute_ops, *program.offload, *program.reload}
        self._sent = {i.message.producer for i in program.items if isinstance(i, Send)}
        self._received = {
            consumer_of(i.message.producer): i.message for i in program.items if isinstance(i, Recv)
        }
        transfers = (*program.offload, *program.reload)
        waited = {first for op in transfers for first in program.waits.get(op, ())}
        self._marked = waited & set(self._compute_ops)

    def run(self) -> None:
        """Run one iteration; returns when all ops, sends and copies of this device have ended."""
        self.times = HostTimes()
        self._events: dict[Op, Event] = {}
        self._queues = [
            (self._lanes.offload, self._store.offload, list(reversed(self.program.offload))),
            (self._lanes.reload, self._store.reload, list(reversed(self.program.reload))),
        ]
        self._outbox: dict[Op, Tensor] = {}
        self._local: dict[Op, Tensor] = {}
        self._position = 0
        self._current: Op | None = None
        try:
            self._lanes.begin()
            self._run_items()
            self._current = None
            self.times.wait(self._transport.finish)
            self.times.wait(self._lanes.finish)
        except RuntimeFault:
            raise
        except Exception as failure:
            fault = self._fault(failure)
            raise fault from (None if fault.__cause__ is not None else failure)
        finally:
            self.times.stop()

    def _run_items(self) -> None:
        self._submit_ready()
        for item in self.program.items:
            if isinstance(item, Compute):
                self._current = item.op
                self._compute(item.op)
            elif isinstance(item, Send):
                self._current = item.message.producer
                self._send(item.message)
            else:
                self._post_receive(item.message)
        left = [op for _, _, queue in self._queues for op in queue]
        if left:
            raise RuntimeError(f"transfers never became ready: {', '.join(map(str, left))}")

    def _send(self, message: Message) -> None:
        output = self._outbox.pop(message.producer)
        aside = self.times.wait if self._transport.sends_block else self.times.message
        aside(lambda: self._transport.send(message, output))

    def _post_receive(self, message: Message) -> None:
        self.times.message(lambda: self._transport.post_receive(message))

    def _compute(self, op: Op) -> None:
        self._lanes.check()
        for first in self.program.waits.get(op, ()):
            if first.kind in ("O", "R"):
                self.times.wait(self._event(first).wait)
        self._handlers[op.kind](op)
        if op in self._marked:
            self._events[op] = self._lanes.mark(op)
        self._position += 1
        self._submit_ready()

    def _submit_ready(self) -> None:
        """Submit every O and R whose waits have all been issued, each lane in its order."""
        moved = True
        while moved:
            moved = False
            for lane, transfer, queue in self._queues:
                while queue and self._issued(queue[-1]):
                    op = queue.pop()
                    waits = self.program.waits.get(op, ())
                    self._events[op] = lane.submit(
                        Job(
                            op,
                            transfer(op),
                            tuple(self._events[w] for w in waits if w in self._own),
                            tuple(w for w in waits if w not in self._own),
                        )
                    )
                    moved = True

    def _issued(self, op: Op) -> bool:
        pace = self.program.pace.get(op)
        if pace is not None and self._place[pace] >= self._position:
            return False
        return all(w in self._events for w in self.program.waits.get(op, ()) if w in self._own)

    def _event(self, op: Op) -> Event:
        event = self._events.get(op)
        if event is None:
            waits = ", ".join(str(w) for w in self.program.waits.get(op, ()))
            raise RuntimeError(f"{op} was not issued before it was waited for (it waits {waits})")
        return event

    def _forward(self, handlers: Handlers, op: Op) -> None:
        received = self._take_input(op)
        with self._store.saving(op):
            output = self._timed(op, lambda: handlers.forward(op, received))
        self._deliver(op, output)

    def _backward_input(self, handlers: Handlers, op: Op) -> None:
        received = self._take_input(op)
        with self._store.using(op):
            output = self._timed(op, lambda: handlers.backward_input(op, received))
        self._deliver(op, output)

    def _backward_weight(self, handlers: Handlers, op: Op) -> None:
        self._timed(op, lambda: handlers.backward_weight(op))

    def _take_input(self, op: Op) -> Tensor | None:
        """The tensor that ``op`` consumes: a message, a local hand-over, or nothing."""
        message = self._received.get(op)
        if message is None:
            return self._local.pop(op, None)
        return self.times.wait(lambda: self._transport.receive(message))

    def _deliver(self, op: Op, output: Tensor | None) -> None:
        """Keep ``output`` for its send, or for the consumer on this device."""
        consumer = consumer_of(op)
        if op in self._sent or consumer in self._own:
            if output is None:
                raise RuntimeError(f"the handler returned nothing, but {consumer} needs its output")
            target = self._outbox if op in self._sent else self._local
            target[op if op in self._sent else consumer] = output.detach()

    def _timed[T](self, op: Op, call: Callable[[], T]) -> T:
        if self._recorder is not None:
            self._recorder.begin(op)
        try:
            return self.times.handler(call)
        finally:
            if self._recorder is not None:
                self._recorder.end(op)

    def _fault(self, failure: Exception) -> RuntimeFault:
        """The fault to raise: another's, if this failure is only its consequence."""
        lost = isinstance(failure, PeerLost)
        if self._abort.fault is not None or (lost and self._abort.wait(PEER_NOTE_S)):
            assert self._abort.fault is not None
            return self._abort.fault
        rank, op = self.program.device, self._current
        position = f"position {self._position + 1} of {len(self._compute_ops)} compute ops"
        text = describe(rank, op, position, f"{type(failure).__name__}: {failure}")
        fault = RuntimeFault(text, rank=rank, op=op, position=position)
        self._abort.fail(fault)
        return self._abort.fault or fault  # another rank's, if that was first


def consumer_of(op: Op) -> Op:
    """The op that takes the output of F or B op ``op``: next stage's F, previous stage's B."""
    return Op(op.kind, op.stage + (1 if op.kind == "F" else -1), op.microbatch)


__all__ = ["Executor", "Handlers", "HostTimes", "RuntimeFault", "Store", "consumer_of"]
