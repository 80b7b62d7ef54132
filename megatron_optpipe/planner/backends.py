"""Solvers of a linear integer program, by name; `scipy` is always there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_optpipe.planner import solve_process
from megatron_optpipe.planner.solve_process import Answer

Solver = Callable[..., Answer]
"""``(arrays, time_limit_s, *, mip_gap, presolve) -> Answer``."""

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {"scipy": solve_process.solve, "inline": solve_process.solve_inline}
)
"""``scipy``: in a process that can be killed; ``inline``: in this one, for tests and benches."""
