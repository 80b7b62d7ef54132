"""Lanes carry offloads and reloads beside the compute; this is their interface.

A lane runs its jobs one after the other, in the order in which they were submitted. The compute
"lane" is the thread (and, on a GPU, the current stream) that runs the executor. Two forms share
this interface: ``thread_lanes`` (a worker thread a lane, on a CPU) and ``cuda_lanes`` (a stream
and events a lane).

The executor submits a job only after everything it waits for has been launched or submitted, so
that an event never has to stand for something that the host has not issued yet: on CUDA a wait on
an event that was not recorded is no wait at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_optpipe.core.op import Op


class Event(Protocol):
    """The end of a job, or a mark in the compute."""

    def wait(self) -> None:
        """Make the compute wait for it; re-raises the failure of the job."""

    def done(self) -> bool:
        """Whether it has passed, without waiting."""


class Transfer(Protocol):
    """What one offload or reload does, in steps that a lane may run at different times."""

    def allocate(self) -> Sequence[Event]:
        """Take the destination memory; runs once all waits of the job hold.

        Returns what the copies must wait for besides: earlier users of that memory.
        """

    def copy(self) -> None:
        """Issue the copies, on the lane."""

    def issued(self, ended: Event) -> None:
        """Give back what only other copies use; a wait for ``ended`` can be issued from now on.

        A lane calls it before anyone may call ``release``, or not at all: ``release`` makes up
        for it.
        """

    def release(self, ended: Event) -> None:
        """Give the source memory back; the copies have ended, or ``ended`` says when they have."""


@dataclass(frozen=True, slots=True)
class Job:
    """One O or R op as a lane takes it."""

    op: Op
    transfer: Transfer
    waits: tuple[Event, ...] = ()
    """Events of this device."""
    turns: tuple[Op, ...] = ()
    """Transfers of other devices on the same link that come first."""


class Lane(Protocol):
    """One direction of copies."""

    @property
    def name(self) -> str:
        """``offload`` or ``reload``."""

    def submit(self, job: Job) -> Event:
        """Queue a job behind the earlier ones; returns the event of its end."""


class Lanes(Protocol):
    """The two lanes of a device."""

    @property
    def offload(self) -> Lane:
        """Device to host."""

    @property
    def reload(self) -> Lane:
        """Host to device."""

    def begin(self) -> None:
        """A new iteration starts."""

    def mark(self, op: Op) -> Event:
        """An event for the end of compute op ``op``, which was just issued."""

    def check(self) -> None:
        """Raise the first failure of any lane; free what finished copies no longer need."""

    def finish(self) -> None:
        """Wait until every submitted job has ended and its memory is given back."""

    def close(self) -> None:
        """Give up threads and streams; the lanes take no further job."""


class Turns(Protocol):
    """Takes turns on links that several devices share (see ``turns``)."""

    def begin(self) -> None:
        """A new iteration starts."""

    def wait(self, op: Op) -> None:
        """Block the calling host thread until transfer ``op`` of another device has ended."""

    def signal(self, op: Op) -> None:
        """Say that transfer ``op`` of this device has ended."""
