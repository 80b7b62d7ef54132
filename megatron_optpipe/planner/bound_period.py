"""Memory arcs of one stage in closed form, for problems too large for `bound_memory`.

Of the microbatches before j, those whose B (or W) has not ended when F(s,j) starts hold at least
so many bytes each; as soon as that exceeds the limit, an earlier B (or W) must have ended. So the
forward of j follows the backward of j - k for a fixed k. When B(s,j) starts, its activations lie
there and every earlier microbatch without its W holds what W gives back; so B follows the W of
j - n. Heads and tails then follow one microbatch at a time.
"""

from __future__ import annotations

import numpy as np

from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.bound_device import Reach

Gap = tuple[int | None, int | None, int | None]


def releases_before(problem: Problem, stage: int) -> Gap:
    """(k, l, n): B(s,j-k) and W(s,j-l) end before F(s,j) starts, W(s,j-n) before B(s,j) starts.

    None: not implied.
    """
    own = problem.stages[stage]
    room = problem.devices[problem.device_of(stage)].memory_bytes - own.activation_bytes
    here = own.activation_bytes - (own.offload_bytes if problem.can_offload(stage) else 0)
    rest = own.activation_bytes - own.backward_frees_bytes
    found: list[int | None] = []
    for least in (here, min(here, rest)):
        found.append(room // least + 1 if least > 0 else None)
    room -= max(0, -own.backward_frees_bytes)
    return found[0], found[1], room // rest + 1 if rest > 0 else None


def memory_reach_of(problem: Problem, reach: Reach) -> Reach | None:
    """Heads and tails with those arcs; None where they imply nothing (or no plan exists)."""
    stages, many = problem.num_stages, problem.num_microbatches
    gaps = [releases_before(problem, s) for s in range(stages)]
    if not any(k is not None and 0 < k < many for pair in gaps for k in pair):
        return None
    if any(k is not None and k < 1 for pair in gaps for k in pair):
        return None
    hop = [
        problem.hop_ms(problem.device_of(s), problem.device_of(s + 1)) for s in range(stages - 1)
    ]
    back = [
        problem.hop_ms(problem.device_of(s + 1), problem.device_of(s)) for s in range(stages - 1)
    ]
    lasts = [
        (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        for stage in problem.stages
    ]
    head = {kind: reach.head[kind].tolist() for kind in "FBW"}
    tail = {kind: reach.tail[kind].tolist() for kind in "FBW"}
    for j in range(many):
        _heads_of(j, head, gaps, hop, back, lasts)
    for j in reversed(range(many)):
        _tails_of(j, many, tail, gaps, hop, back, lasts)
    return Reach(
        {kind: np.array(rows) for kind, rows in head.items()},
        {kind: np.array(rows) for kind, rows in tail.items()},
    )


Rows = dict[str, list[list[float]]]
Gaps = list[Gap]
Lasts = list[tuple[float, float, float]]


def _heads_of(
    j: int, head: Rows, gaps: Gaps, hop: list[float], back: list[float], lasts: Lasts
) -> None:
    forward, backward, weight = head["F"], head["B"], head["W"]
    for s, (f, b, w) in enumerate(lasts):
        ready = forward[s][j]
        if s:
            ready = max(ready, forward[s - 1][j] + lasts[s - 1][0] + hop[s - 1])
        if j:
            ready = max(ready, forward[s][j - 1] + f)
        k, after_w, _ = gaps[s]
        if k is not None and j >= k:
            ready = max(ready, backward[s][j - k] + b)
        if after_w is not None and j >= after_w:
            ready = max(ready, weight[s][j - after_w] + w)
        forward[s][j] = ready
    for s in reversed(range(len(lasts))):
        f, b, w = lasts[s]
        ready = max(backward[s][j], forward[s][j] + f)
        if s + 1 < len(lasts):
            ready = max(ready, backward[s + 1][j] + lasts[s + 1][1] + back[s])
        if j:
            ready = max(ready, backward[s][j - 1] + b)
        between = gaps[s][2]
        if between is not None and j >= between:
            ready = max(ready, weight[s][j - between] + lasts[s][2])
        backward[s][j] = ready
        weight[s][j] = max(ready + b, weight[s][j - 1] + w if j else 0.0)


def _tails_of(
    j: int, many: int, tail: Rows, gaps: Gaps, hop: list[float], back: list[float], lasts: Lasts
) -> None:
    forward, backward, weight = tail["F"], tail["B"], tail["W"]
    for s, (f, b, w) in enumerate(lasts):
        k, after_w, between = gaps[s]
        end = weight[s][j]
        if j + 1 < many:
            end = max(end, w + weight[s][j + 1])
        if after_w is not None and j + after_w < many:
            end = max(end, f + forward[s][j + after_w])
        if between is not None and j + between < many:
            end = max(end, b + backward[s][j + between])
        weight[s][j] = end
        end = max(backward[s][j], w + end)
        if s:
            end = max(end, back[s - 1] + lasts[s - 1][1] + backward[s - 1][j])
        if j + 1 < many:
            end = max(end, b + backward[s][j + 1])
        if k is not None and j + k < many:
            end = max(end, f + forward[s][j + k])
        backward[s][j] = end
    for s in reversed(range(len(lasts))):
        f, b, _ = lasts[s]
        end = max(forward[s][j], b + backward[s][j])
        if s + 1 < len(lasts):
            end = max(end, hop[s] + lasts[s + 1][0] + forward[s + 1][j])
        if j + 1 < many:
            end = max(end, f + forward[s][j + 1])
        forward[s][j] = end
