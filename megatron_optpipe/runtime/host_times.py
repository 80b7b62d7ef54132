"""Where the compute thread's time goes in one iteration."""

from __future__ import annotations

import time
from collections.abc import Callable


class HostTimes:
    """Sorts one run of the executor into handlers, waiting, the backend's calls that start sends
    and receives, and what is left: its own overhead.

    Wall time has in it what other processes of the machine take; the thread's CPU time has not.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.handlers_s = 0.0
        self.waiting_s = 0.0
        self.messages_s = 0.0
        self.messages_cpu_s = 0.0
        self._total_cpu_s = 0.0
        self._aside_cpu_s = 0.0
        self._began = (time.perf_counter(), time.thread_time())

    @property
    def overhead_s(self) -> float:
        """Wall time of the executor itself."""
        return self.total_s - self.handlers_s - self.waiting_s - self.messages_s

    @property
    def overhead_cpu_s(self) -> float:
        """CPU time of the executor itself."""
        return self._total_cpu_s - self._aside_cpu_s - self.messages_cpu_s

    def stop(self) -> None:
        """The run has ended."""
        self.total_s = time.perf_counter() - self._began[0]
        self._total_cpu_s = time.thread_time() - self._began[1]

    def handler[T](self, call: Callable[[], T]) -> T:
        """Call a handler."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            self.handlers_s += time.perf_counter() - wall_s
            self._aside_cpu_s += time.thread_time() - cpu_s

    def wait[T](self, call: Callable[[], T]) -> T:
        """Call something that waits."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            self.waiting_s += time.perf_counter() - wall_s
            self._aside_cpu_s += time.thread_time() - cpu_s

    def message(self, call: Callable[[], None]) -> None:
        """Start a send or a receive."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            call()
        finally:
            self.messages_s += time.perf_counter() - wall_s
            self.messages_cpu_s += time.thread_time() - cpu_s
