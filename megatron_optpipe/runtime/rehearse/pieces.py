"""How the bytes of a stage are cut into pieces, and how far all bytes are scaled down.

What leaves with an offload and what stays until W are two cuts through the same activations, so a
stage has four pieces. Rounding is such that no sum of pieces exceeds the scaled figure of the plan.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from megatron_optpipe.core import Plan, Problem, Stage, summarize

COPY_GBPS = 0.25
"""What all ranks together copy at most: a small part of what two cores can, so that copies take
little of the time that is left for the ranks to be punctual."""

MEMORY_SHARE = 0.25
"""The part of this machine's free memory that a rehearsal may use."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes of one (stage, microbatch): moved or not by an offload, freed or not by B."""

    moved_freed: int
    moved_kept: int
    stays_freed: int
    stays_kept: int
    backward_takes: int
    """What B allocates on top, until W (a negative ``backward_frees_bytes``)."""

    @classmethod
    def of(cls, stage: Stage, byte_scale: float) -> Pieces:
        """The pieces of a stage, scaled."""
        whole = math.floor(stage.activation_bytes * byte_scale)
        frees = max(stage.backward_frees_bytes, 0)
        kept = math.floor((stage.activation_bytes - frees) * byte_scale)
        moved = min(whole, math.ceil(stage.offload_bytes * byte_scale))
        kept = min(kept, whole)
        moved_kept = min(moved, kept)
        return cls(
            moved_freed=moved - moved_kept,
            moved_kept=moved_kept,
            stays_freed=whole - kept - (moved - moved_kept),
            stays_kept=kept - moved_kept,
            backward_takes=math.floor(max(-stage.backward_frees_bytes, 0) * byte_scale),
        )


def free_memory_bytes() -> int:
    """Free memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def fitting_byte_scale(problem: Problem, plan: Plan, scale: float, memory_bytes: int) -> float:
    """The largest factor of at most 1 at which the rehearsal fits into ``memory_bytes``, and its
    copies into the time that the plan has for them (times are multiplied by ``scale``)."""
    summary = summarize(problem, plan)
    held = sum(summary.peak_bytes) + summary.host_peak_bytes
    # Every O comes back as an R, and fresh memory is touched once more than it is copied.
    copied = 3 * sum(summary.moved_bytes)
    can_copy = COPY_GBPS * 1e6 * summary.makespan_ms * scale
    return min(1.0, memory_bytes / max(held, 1), can_copy / max(copied, 1))
