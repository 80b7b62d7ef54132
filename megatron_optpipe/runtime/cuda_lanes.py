"""The CUDA form of lanes: a stream a lane, a CUDA event a job.

What makes this correct:

* All device memory is allocated on the compute stream and given back only after the compute stream
  has been made to wait for the last copy that uses it. The caching allocator then orders its reuse
  by the compute stream alone, and ``record_stream`` (which delays reuse until some later poll, and
  so makes memory depend on luck) is not needed.
* Once the compute stream waits for an offload, it is behind all earlier offloads of the device too:
  they are on one stream, and the order of streams is transitive. So their memory goes back as well.
  The plan counts on that: it names only the last offload that an allocation needs
  (``memory_waits``). A reload that waits for an offload makes the compute stream wait for it, so
  neither a reload nor a mark is ever behind an offload that the compute stream is not behind.
* The copies of a reload wait for the compute stream as it was when their memory was allocated:
  what used that memory before may still be running.
* A host buffer is used by copies only. It goes back to the pool as soon as the reload out of it
  has been issued, together with the event of its end: the next copy into it waits for that event
  on its own stream. So no more buffers are taken than the order of the plan needs, however far
  the host is ahead.
* A wait is only issued on an event that has been recorded: the executor submits a job when all it
  waits for has been submitted, in one order.

On links that several devices share, the host must wait for its turn; a worker thread a lane does
that, issues the copies and passes the turn on, while the compute thread goes ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from megatron_optpipe.core.op import Op
from megatron_optpipe.runtime.abort import POLL_S, Abort
from megatron_optpipe.runtime.faults import RuntimeFault, describe
from megatron_optpipe.runtime.lanes import Event, Job, Turns
from megatron_optpipe.runtime.recorder import Recording


class CudaMark:
    """A point of the compute stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        """The compute stream is behind its own marks already."""

    def done(self) -> bool:
        """Whether the device has passed it."""
        return bool(self.event.query())


class CudaJobEvent:
    """The end of a job's copies; the source memory goes back when the compute has waited.

    ``offloads``: the compute stream that waits for it is behind so many offloads of this iteration.
    For an offload its own place in the lane, from 1. For a reload 0: nothing that is not known.
    """

    def __init__(self, job: Job, lanes: CudaLanes, offloads: int = 0) -> None:
        self.job = job
        self.offloads = offloads
        self.event = torch.cuda.Event()
        self.issued = threading.Event()
        self.turn_passed = threading.Event()
        self._lanes = lanes
        self._lock = threading.Lock()
        self._released = False

    def wait(self) -> None:
        """Make the compute stream wait; then give back the memory of all that it is behind now."""
        while not self.issued.wait(POLL_S):
            self._lanes.abort.check()
        self._lanes.compute.wait_event(self.event)
        self._lanes.passed(self)

    def done(self) -> bool:
        """Whether the copies have ended on the device."""
        return self.issued.is_set() and bool(self.event.query())

    def release(self) -> None:
        """Give the source memory back, once; the caller knows that the copies are ordered."""
        with self._lock:
            # Inside the lock: who comes second goes on only when it has been done.
            if not self._released:
                self.job.transfer.release(self)
                self._released = True


class CudaLane:
    """One direction of copies on a stream of its own."""

    def __init__(self, name: str, lanes: CudaLanes) -> None:
        self.name = name
        self.stream = torch.cuda.Stream(lanes.device)
        self._lanes = lanes
        self._jobs: queue.SimpleQueue[CudaJobEvent | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if lanes.turns is not None:
            self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
            self._thread.start()

    def submit(self, job: Job) -> CudaJobEvent:
        """Issue the job now, or queue it for the thread that waits for its turn."""
        event = self._lanes.enlist(job)
        if self._thread is None:
            if job.turns:
                raise RuntimeError(
                    f"{job.op} shares its link with {job.turns[0]} of another device; "
                    "give the lanes turns to take"
                )
            self._issue(event)
        else:
            self._jobs.put(event)
        return event

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=5.0)

    def _issue(self, event: CudaJobEvent) -> None:
        lanes, job = self._lanes, event.job
        for wait in job.waits:
            if isinstance(wait, CudaJobEvent) and job.op.kind == "R":
                # The room for a reload is what earlier offloads gave back: it is allocated on the
                # compute stream, so that is where their end must be known.
                wait.wait()
            self._behind(wait)
        with torch.cuda.stream(lanes.compute):
            earlier_users = job.transfer.allocate()
        for wait in earlier_users:
            self._behind(wait)
        if job.op.kind == "R":
            allocated = torch.cuda.Event()
            allocated.record(lanes.compute)
            self.stream.wait_event(allocated)
        with torch.cuda.stream(self.stream):
            if lanes.recorder is not None:
                lanes.recorder.begin(job.op)
            if lanes.before_copy is not None:
                lanes.before_copy(job.op)
            job.transfer.copy()
            if lanes.recorder is not None:
                lanes.recorder.end(job.op)
            event.event.record(self.stream)
        job.transfer.issued(event)
        event.issued.set()

    def _behind(self, wait: Event) -> None:
        """Make the stream of this lane wait."""
        if isinstance(wait, CudaJobEvent):
            while not wait.issued.wait(POLL_S):
                self._lanes.abort.check()
        assert isinstance(wait, CudaJobEvent | CudaMark)
        self.stream.wait_event(wait.event)

    def _work(self) -> None:
        torch.cuda.set_device(self._lanes.device)
        turns = self._lanes.turns
        assert turns is not None
        while (event := self._jobs.get()) is not None:
            try:
                self._lanes.abort.check()
                for other in event.job.turns:
                    turns.wait(other)
                self._issue(event)
                event.event.synchronize()
                turns.signal(event.job.op)
                event.turn_passed.set()
            except RuntimeFault as fault:
                self._lanes.abort.fail(fault)
            except Exception as failure:
                op, rank = event.job.op, self._lanes.rank
                position = f"its {self.name} lane"
                text = describe(rank, op, position, f"{type(failure).__name__}: {failure}")
                self._lanes.abort.fail(RuntimeFault(text, rank=rank, op=op, position=position))


class CudaLanes:
    """Both lanes of a device; made on the thread that runs the executor.

    ``turns``: given where links are shared with other devices (``turns.takes_turns``); the lanes
    then have threads. The compute stream is the current stream at construction.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        abort: Abort | None = None,
        recorder: Recording | None = None,
        turns: Turns | None = None,
        before_copy: Callable[[Op], None] | None = None,
    ) -> None:
        self.rank = rank
        self.abort = abort or Abort()
        self.recorder = recorder
        self.turns = turns
        self.before_copy = before_copy
        self.compute = torch.cuda.current_stream()
        self.device = self.compute.device
        self.pending: list[CudaJobEvent] = []
        self._offloads: list[CudaJobEvent] = []
        """The offloads of this iteration, in the order of the lane."""
        self._num_passed = 0
        """So many of them the compute stream is known to be behind; their memory is given back."""
        self._lock = threading.Lock()
        self.offload = CudaLane("offload", self)
        self.reload = CudaLane("reload", self)

    def begin(self) -> None:
        """A new iteration starts."""
        self._forget_offloads()
        if self.turns is not None:
            self.turns.begin()

    def enlist(self, job: Job) -> CudaJobEvent:
        """The event of a job that is submitted now."""
        is_offload = job.op.kind == "O"
        with self._lock:
            event = CudaJobEvent(job, self, len(self._offloads) + 1 if is_offload else 0)
            if is_offload:
                self._offloads.append(event)
        self.pending.append(event)
        return event

    def passed(self, event: CudaJobEvent) -> None:
        """The compute stream has been made to wait for ``event``: give back all that it is behind.

        Any thread may call it. Offloads before an issued one are issued too. Inside the lock, as
        in ``release``: who comes second goes on only when all of that memory has been given back.
        """
        with self._lock:
            for offload in self._offloads[self._num_passed : event.offloads]:
                offload.release()
            self._num_passed = max(self._num_passed, event.offloads)
        event.release()

    def mark(self, op: Op) -> CudaMark:
        """The end of what has been issued to the compute stream."""
        return CudaMark(self.compute)

    def check(self) -> None:
        """Raise the first fault; give back the memory of offloads that have ended meanwhile."""
        self.abort.check()
        self._free_ended()

    def finish(self) -> None:
        """Make the compute stream wait for all jobs and give back what they hold."""
        for event in self.pending:
            event.wait()
            # Once all turns of this iteration are passed on, the next one may begin.
            while self.turns is not None and not event.turn_passed.wait(POLL_S):
                self.abort.check()
        self.pending.clear()
        self._forget_offloads()

    def close(self) -> None:
        """End the threads."""
        self.offload.close()
        self.reload.close()

    def _forget_offloads(self) -> None:
        """Places are counted anew in each iteration."""
        with self._lock:
            self._offloads.clear()
            self._num_passed = 0

    def _free_ended(self) -> None:
        """Only offloads: a reload's release hands its memory to B, which waits for it anyway.

        Not where threads issue: they release what they wait for.
        """
        left = []
        for event in self.pending:
            if event.job.op.kind == "O" and event.done() and self.turns is None:
                event.release()  # the copies are over: no stream can be behind them
            else:
                left.append(event)
        self.pending = left
