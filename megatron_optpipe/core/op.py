"""An op is data: what runs, for which stage and which microbatch.

Times and bytes live beside an op, never in its identity, so that an op of a plan, of a
measurement and of a program are the same key.
"""

from __future__ import annotations

from typing import NamedTuple

COMPUTE = ("F", "B", "W")
"""Forward, gradient with respect to the input, gradient with respect to the weights."""

TRANSFER = ("O", "R")
"""Offload (device to host) and reload (host to device)."""

TIME_TOLERANCE_MS = 1e-6
"""Comparisons of times allow this error (the contract, "Units")."""


class Op(NamedTuple):
    """One operation of a pipeline iteration: kind, stage, microbatch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.microbatch})"
