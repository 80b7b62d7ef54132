"""The CPU form of lanes: a worker thread a lane, an event a job.

The compute lane is the thread that runs the executor. All logic of the runtime runs and is tested
on these; ``before_copy`` lets a test slow a lane down, ``after_copy`` lets a rehearsal keep a
link's speed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from megatron_optpipe.core.op import Op
from megatron_optpipe.runtime.abort import POLL_S, Abort
from megatron_optpipe.runtime.faults import RuntimeFault, describe
from megatron_optpipe.runtime.lanes import Job, Turns
from megatron_optpipe.runtime.recorder import Recording


class ThreadEvent:
    """The end of a job that a worker thread runs."""

    def __init__(self, op: Op, abort: Abort) -> None:
        self.op = op
        self._ended = threading.Event()
        self._abort = abort

    def set(self) -> None:
        """The job has ended."""
        self._ended.set()

    def wait(self) -> None:
        """Block the calling thread; raises the fault of this rank or another."""
        while not self._ended.wait(POLL_S):
            self._abort.check()

    def done(self) -> bool:
        """Whether the job has ended."""
        return self._ended.is_set()


class Passed:
    """A mark in the compute: on a CPU an op has ended when its call returns."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """Always."""
        return True


class ThreadLane:
    """One direction of copies, run by one thread in the order of submission."""

    def __init__(self, name: str, lanes: ThreadLanes) -> None:
        self.name = name
        self._lanes = lanes
        self._jobs: queue.SimpleQueue[tuple[Job, ThreadEvent] | None] = queue.SimpleQueue()
        self._count = 0
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> ThreadEvent:
        """Queue a job; never blocks."""
        event = ThreadEvent(job.op, self._lanes.abort)
        self._lanes.pending.append(event)
        self._jobs.put((job, event))
        return event

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self._jobs.put(None)
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, event = entry
            self._count += 1
            try:
                self._lanes.abort.check()
                self._lanes.run(job, event)
            except RuntimeFault as fault:
                self._lanes.abort.fail(fault)
            except Exception as failure:
                self._lanes.abort.fail(self._fault(job.op, failure))

    def _fault(self, op: Op, failure: Exception) -> RuntimeFault:
        position = f"transfer {self._count} of its {self.name} lane"
        rank, cause = self._lanes.rank, f"{type(failure).__name__}: {failure}"
        text = describe(rank, op, position, cause)
        fault = RuntimeFault(text, rank=rank, op=op, position=position)
        fault.__cause__ = failure
        return fault


class ThreadLanes:
    """Both lanes of a device. ``abort`` interrupts waits, ``turns`` orders shared links."""

    def __init__(
        self,
        rank: int = 0,
        *,
        abort: Abort | None = None,
        recorder: Recording | None = None,
        turns: Turns | None = None,
        before_copy: Callable[[Op], None] | None = None,
        after_copy: Callable[[Op, float], None] | None = None,
    ) -> None:
        """``after_copy`` gets the op and the ``perf_counter`` time at which it began."""
        self.rank = rank
        self.abort = abort or Abort()
        self.pending: list[ThreadEvent] = []
        self._recorder = recorder
        self._turns = turns
        self._before_copy = before_copy
        self._after_copy = after_copy
        self.offload = ThreadLane("offload", self)
        self.reload = ThreadLane("reload", self)

    def begin(self) -> None:
        """A new iteration starts."""
        if self._turns is not None:
            self._turns.begin()

    def mark(self, op: Op) -> Passed:
        """The end of a compute op that has just returned."""
        return Passed()

    def check(self) -> None:
        """Raise the first fault."""
        self.abort.check()

    def finish(self) -> None:
        """Wait for all jobs."""
        for event in self.pending:
            event.wait()
        self.pending.clear()

    def close(self) -> None:
        """End both threads."""
        self.offload.close()
        self.reload.close()

    def run(self, job: Job, event: ThreadEvent) -> None:
        """One job, on the thread of its lane."""
        for wait in job.waits:
            wait.wait()
        for other in job.turns:
            if self._turns is None:
                raise RuntimeError(
                    f"{job.op} shares its link with {other} of another device; "
                    "give the lanes turns to take"
                )
            self._turns.wait(other)
        for wait in job.transfer.allocate():
            wait.wait()
        began = time.perf_counter()
        if self._recorder is not None:
            self._recorder.begin(job.op)
        if self._before_copy is not None:
            self._before_copy(job.op)
        job.transfer.copy()
        if self._after_copy is not None:
            self._after_copy(job.op, began)
        if self._recorder is not None:
            self._recorder.end(job.op)
        job.transfer.release(event)
        if self._turns is not None:
            # Before the event: once all events are set, the next iteration may begin.
            self._turns.signal(job.op)
        event.set()
