"""Wrappers that tell a ``History`` what a run waits for: lanes, transport, recorder.

Only real synchronisation counts. That a job was submitted, or that a thread happened to be late,
proves nothing: on a GPU neither orders anything.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.program import Message
from megatron_optpipe.runtime.happens_before import History, Thread
from megatron_optpipe.runtime.lanes import Event, Job, Lane, Lanes, Transfer
from megatron_optpipe.runtime.recorder import Recording
from megatron_optpipe.runtime.transport import Transport


class TracedEvent:
    """An event of the wrapped lanes; waiting for it teaches the compute thread."""

    def __init__(self, base: Event, op: Op, history: History, compute: Thread) -> None:
        self.base = base
        self.op = op
        self._history = history
        self._compute = compute

    def wait(self) -> None:
        """Wait, then learn what the end of the op proves."""
        self.base.wait()
        self._history.learn_end(self._compute, self.op)

    def done(self) -> bool:
        """As the wrapped event says; looking at it proves nothing."""
        return self.base.done()


class _TracedTransfer:
    """A transfer that records its begin and end, and what its job waited for."""

    def __init__(self, job: Job, history: History, thread: Thread) -> None:
        self._job = job
        self._history = history
        self._thread = thread

    def allocate(self) -> Sequence[Event]:
        for wait in self._job.waits:
            assert isinstance(wait, TracedEvent)
            self._history.learn_end(self._thread, wait.op)
        for other in self._job.turns:
            self._history.learn_end(self._thread, other)
        self._history.begin(self._thread, self._job.op)
        return self._job.transfer.allocate()

    def copy(self) -> None:
        self._job.transfer.copy()

    def issued(self, ended: Event) -> None:
        self._job.transfer.issued(ended)

    def release(self, ended: Event) -> None:
        self._job.transfer.release(ended)
        self._history.end(self._thread, self._job.op)


class TracedLane:
    """One wrapped lane."""

    def __init__(self, base: Lane, history: History, device: int) -> None:
        self.name = base.name
        self._base = base
        self._history = history
        self._device = device

    def submit(self, job: Job) -> TracedEvent:
        """Submit the job with its transfer wrapped."""
        transfer: Transfer = _TracedTransfer(job, self._history, (self._device, self.name))
        waits = tuple(w.base if isinstance(w, TracedEvent) else w for w in job.waits)
        base = self._base.submit(Job(job.op, transfer, waits, job.turns))
        return TracedEvent(base, job.op, self._history, (self._device, "compute"))


class TracedLanes:
    """Both lanes of a device, wrapped."""

    def __init__(self, base: Lanes, history: History, device: int) -> None:
        self._base = base
        self._history = history
        self._device = device
        self.offload = TracedLane(base.offload, history, device)
        self.reload = TracedLane(base.reload, history, device)

    def begin(self) -> None:
        """A new iteration starts."""
        self._base.begin()

    def mark(self, op: Op) -> TracedEvent:
        """The wrapped mark; what it proves is what ``op`` proved when it ended."""
        return TracedEvent(self._base.mark(op), op, self._history, (self._device, "compute"))

    def check(self) -> None:
        """Raise the first failure."""
        self._base.check()

    def finish(self) -> None:
        """Wait for all jobs."""
        self._base.finish()

    def close(self) -> None:
        """Close the wrapped lanes."""
        self._base.close()


class TracedRecorder:
    """Tells the history where compute ops begin and end, and an inner recorder everything."""

    def __init__(self, history: History, device: int, base: Recording | None = None) -> None:
        self._history = history
        self._thread: Thread = (device, "compute")
        self._base = base

    def begin(self, op: Op) -> None:
        """``op`` starts now."""
        self._history.begin(self._thread, op)
        if self._base is not None:
            self._base.begin(op)

    def end(self, op: Op) -> None:
        """``op`` has ended."""
        if self._base is not None:
            self._base.end(op)
        self._history.end(self._thread, op)


class TracedTransport:
    """A transport whose messages carry what their sender knows.

    ``carried`` is shared by all devices of the run, which are threads of one process.
    """

    def __init__(
        self,
        base: Transport,
        history: History,
        device: int,
        carried: dict[Message, dict[Thread, int]],
    ) -> None:
        self._base = base
        self._history = history
        self._thread: Thread = (device, "compute")
        self._carried = carried
        self._lock = threading.Lock()

    @property
    def sends_block(self) -> bool:
        """As the wrapped transport."""
        return self._base.sends_block

    def post_receive(self, message: Message) -> None:
        """Start receiving."""
        self._base.post_receive(message)

    def receive(self, message: Message) -> Tensor:
        """Take a message, and learn what its sender knew."""
        tensor = self._base.receive(message)
        self._history.learn(self._thread, self._carried[message])
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send with the clock of now."""
        self._carried[message] = self._history.clock(self._thread)
        self._base.send(message, tensor)

    def finish(self) -> None:
        """Wait for all sends."""
        self._base.finish()
