"""One rank's failure becomes everyone's, within seconds and by name.

``Abort`` is the hub of one rank: the first fault is kept, whoever is blocked is interrupted, and
``check`` raises it. ``StoreAbort`` also writes the fault where all ranks look (a torch store) and
looks there itself from a thread; a process that is still alive some seconds after a fault, because
its main thread is stuck where nothing can reach it, prints the fault and exits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from megatron_optpipe.core.op import Op
from megatron_optpipe.runtime.faults import Aborted, RuntimeFault

POLL_S = 0.5
"""How often a rank looks for the note of another: a small message to the store."""

GRACE_S = 15.0
"""How long a process may take to end by itself after a fault."""


class Abort:
    """The faults of one rank; safe to use from any thread."""

    def __init__(self) -> None:
        self.fault: RuntimeFault | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], None]] = []

    def on_fault(self, interrupt: Callable[[], None]) -> None:
        """``interrupt`` is called once, from any thread, when the first fault is known."""
        self._interrupts.append(interrupt)

    def fail(self, fault: RuntimeFault) -> None:
        """Keep ``fault`` if it is the first, and interrupt whoever is blocked."""
        with self._lock:
            if self.fault is not None:
                return
            self.fault = fault
        self._known.set()
        for interrupt in self._interrupts:
            interrupt()

    def check(self) -> None:
        """Raise the kept fault, if there is one."""
        if self.fault is not None:
            raise self.fault

    def wait(self, timeout_s: float) -> bool:
        """Wait for a fault; whether there is one."""
        return self._known.wait(timeout_s)

    def close(self) -> None:
        """Nothing can fail any more."""


class StoreAbort(Abort):
    """An ``Abort`` that all ranks of a group share through ``store`` (its own connection)."""

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        poll_s: float = POLL_S,
        grace_s: float | None = GRACE_S,
    ) -> None:
        """``grace_s=None``: never end the process from the watching thread."""
        super().__init__()
        self._store = store
        self._rank = rank
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._closed = threading.Event()
        self._store_lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="abort-watch", daemon=True)
        self._thread.start()

    def fail(self, fault: RuntimeFault) -> None:
        """Keep the fault and, if it is this rank's own, tell the others first.

        Where another rank was first with a fault of its own, that one is kept: this rank's is
        mostly its consequence, seen before the note of it was.
        """
        if self.fault is None and not isinstance(fault, Aborted):
            fault = self._publish(fault)
        super().fail(fault)

    def close(self) -> None:
        """Stop watching; call it when the rank has ended well or has raised."""
        self._closed.set()
        self._thread.join(timeout=2 * self._poll_s + 1.0)

    def _publish(self, fault: RuntimeFault) -> RuntimeFault:
        """Note ``fault`` where all ranks look; the fault that stands there now."""
        note = {
            "rank": fault.rank,
            "op": None if fault.op is None else list(fault.op),
            "position": fault.position,
            "message": str(fault),
        }
        try:
            with self._store_lock:
                stands = json.loads(self._store.compare_set("fault", "", json.dumps(note)))
        except RuntimeError:
            return fault  # the store went with its host; the closed connections tell the others
        return fault if stands == note else _aborted(stands)

    def _read(self) -> RuntimeFault | None:
        try:
            with self._store_lock:
                if not self._store.check(["fault"]):
                    return None
                note = json.loads(self._store.get("fault"))
        except RuntimeError:
            return None
        return _aborted(note)

    def _watch(self) -> None:
        while self.fault is None and not self._closed.wait(self._poll_s):
            found = self._read()
            if found is not None:
                super().fail(found)
        if self.fault is None or self._grace_s is None or self._closed.wait(self._grace_s):
            return
        print(
            f"optpipe: {self.fault}; rank {self._rank} did not end within {self._grace_s:g} s "
            "by itself and is ended now",
            file=sys.stderr,
            flush=True,
        )
        os._exit(70)


def _aborted(note: dict[str, Any]) -> Aborted:
    op = None if note["op"] is None else Op(*note["op"])
    return Aborted(note["message"], rank=note["rank"], op=op, position=note["position"])
