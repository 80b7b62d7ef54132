"""What an exact engine hands back, whichever it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from megatron_optpipe.core.plan import Plan

SHORTER_MS = 1e-6
"""By how much a plan must beat the incumbent to count."""


@dataclass(frozen=True, slots=True)
class MilpResult:
    """A checked plan (or None), a proven lower bound (or None), and how the solver stopped."""

    plan: Plan | None
    lower_bound_ms: float | None
    status: str
    nodes: int = 0


def warned(status: str) -> MilpResult:
    """No result, and one warning that says why; the caller keeps its plan."""
    warnings.warn(f"solver: {status}; the plan in hand is kept", RuntimeWarning, stacklevel=4)
    return MilpResult(None, None, status)
