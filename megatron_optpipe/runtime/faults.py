"""What the runtime raises, worded for the person who reads the log of one rank."""

from __future__ import annotations

from megatron_optpipe.core.op import Op


class RuntimeFault(RuntimeError):
    """A failure while a plan was executed; the message names rank, op and position.

    ``rank`` is the device of the plan that failed, which is not always the rank that raises.
    """

    def __init__(self, message: str, *, rank: int, op: Op | None, position: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.position = position


class Aborted(RuntimeFault):
    """Another rank failed; this one stops because of it and repeats the other's message."""


def describe(rank: int, op: Op | None, position: str, cause: str) -> str:
    """One line that names the rank, the op, its position and the cause."""
    what = f"op {op}" if op is not None else "no op"
    return f"rank {rank} failed at {what}, {position}: {cause}"
