"""Turns on a link that several devices share: one transfer at a time, in the plan's order.

The end of a transfer that another device waits for is written to a torch store under its name and
the iteration's number; the waiting lane blocks on that key. Two small messages a turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from megatron_optpipe.core.op import TRANSFER, Op
from megatron_optpipe.core.program import Program
from megatron_optpipe.runtime.abort import Abort

SLICE = timedelta(seconds=1.0)
"""A blocked lane looks for a fault this often."""


def awaited_elsewhere(programs: Sequence[Program], device: int) -> frozenset[Op]:
    """The transfers of ``device`` whose end another device waits for."""
    own = {*programs[device].offload, *programs[device].reload}
    return frozenset(
        need
        for program in programs
        if program.device != device
        for needs in program.waits.values()
        for need in needs
        if need in own
    )


def takes_turns(programs: Sequence[Program], device: int) -> bool:
    """Whether ``device`` waits for transfers of others, or others for its own."""
    program = programs[device]
    own = {*program.offload, *program.reload}
    waits = {need for op in own for need in program.waits.get(op, ()) if need.kind in TRANSFER}
    return bool(waits - own) or bool(awaited_elsewhere(programs, device))


class StoreTurns:
    """``Turns`` over a store; each thread uses a connection of its own.

    ``connect`` makes one: a thread that blocks in a store holds its connection.
    """

    def __init__(self, connect: Callable[[], Store], awaited: frozenset[Op], abort: Abort) -> None:
        self._connect = connect
        self._of_thread = threading.local()
        self._awaited = awaited
        self._abort = abort
        self._iteration = -1

    @property
    def _store(self) -> Store:
        store: Store | None = getattr(self._of_thread, "store", None)
        if store is None:
            store = self._of_thread.store = self._connect()
        return store

    def begin(self) -> None:
        """A new iteration: its keys are new, those of the last but one are removed.

        Whoever ends an iteration has messages from every other rank that prove that all have
        ended the iteration before, so nobody waits for a removed key.
        """
        self._iteration += 1
        for op in self._awaited if self._iteration >= 2 else ():
            self._store.delete_key(f"{self._iteration - 2}/{op}")

    def wait(self, op: Op) -> None:
        """Block until ``op`` of another device has ended in this iteration."""
        key = f"{self._iteration}/{op}"
        while True:
            try:
                self._store.wait([key], SLICE)
            except RuntimeError:  # DistStoreError: the slice has passed
                self._abort.check()
            else:
                return

    def signal(self, op: Op) -> None:
        """``op`` of this device has ended."""
        if op in self._awaited:
            self._store.set(f"{self._iteration}/{op}", "1")
