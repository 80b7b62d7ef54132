"""Sleeping until a moment: one clock for all processes of a machine."""

from __future__ import annotations

import time

SPIN_S = 50e-6
"""The last part of a sleep is spun: shorter than what a timer may be late by."""


def now_s() -> float:
    """This machine's monotonic clock, the same in every process."""
    return time.monotonic()


def sleep_until(deadline_s: float) -> None:
    """Return at ``deadline_s`` of ``now_s``, or at once if it has passed."""
    while (left := deadline_s - time.monotonic()) > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.monotonic() < deadline_s:
        pass
