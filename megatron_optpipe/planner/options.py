"""What a caller may ask of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_optpipe.core.errors import OptPipeError

STRATEGIES = ("aggressive", "conservative", "auto")


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How to plan. The same problem, options and seed give the same plan bytes."""

    method: str = "auto"
    time_limit_s: float = 10.0
    """Wall time of the planner; a plan comes back at most 2 s later. Only where the time is below
    what one schedule takes to build, write down and check (0.1 ms for each F, B and W: 10 s for 64
    devices x 512 microbatches; twice that uncompiled) it takes that."""
    seed: int = 0
    mipgap: float = 0.0
    """Relative gap at which the solver may stop."""
    max_microbatches: int | None = None
    """Look for the shape of a plan on at most so many microbatches; ``None``: decided by size."""
    offload_strategy: str = "auto"
    """``aggressive``: offload whatever stays away long enough; ``conservative``: only what memory
    needs; ``auto``: whichever plan is shorter, then whichever moves fewer bytes."""
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.offload_strategy not in STRATEGIES:
            raise OptPipeError(
                f"offload_strategy = {self.offload_strategy!r}: must be one of "
                f"{', '.join(STRATEGIES)}"
            )
        if not self.time_limit_s > 0:
            raise OptPipeError(f"time_limit_s = {self.time_limit_s}: must be greater than 0")
        if not 0 <= self.mipgap < 1:
            raise OptPipeError(
                f"mipgap = {self.mipgap}: must be at least 0 and less than 1, like 0.01 for 1 %"
            )
        if self.max_microbatches is not None and self.max_microbatches < 1:
            raise OptPipeError(f"max_microbatches = {self.max_microbatches}: must be at least 1")
