"""The classic pipeline schedules as orders of ops, for any problem whose placement allows them.

The orders say nothing about memory: ``core.timing.time_orders`` finds their times, or says that
they do not fit. Sources: 1F1B and interleaved 1F1B (Megatron-LM, arXiv 2104.04473), GPipe
(1811.06965), ZB-H1 and ZB-H2 (Zero Bubble, 2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import Orders


def gpipe(problem: Problem) -> Orders:
    """All forwards, then all backwards, each W right after its B. Any placement."""
    microbatches = range(problem.num_microbatches)
    compute = []
    for device in range(problem.num_devices):
        stages = problem.stages_on(device)
        lane = [Op("F", stage, j) for stage in stages for j in microbatches]
        for stage in reversed(stages):
            for j in microbatches:
                lane += [Op("B", stage, j), Op("W", stage, j)]
        compute.append(tuple(lane))
    return _compute_only(compute)


def one_f_one_b(problem: Problem) -> Orders:
    """1F1B: D-1-i forwards ahead on the i-th device, each W right after its B.

    Raises ``OptPipeError`` where a device owns stages that do not follow each other.
    """
    return _one_forward_one_backward(problem, "1f1b", ahead=1, deferral=0)


def zb_h1(problem: Problem) -> Orders:
    """ZB-H1: the forwards of 1F1B, W of the i-th device deferred by i microbatches.

    With several chunks a device the forwards of interleaved 1F1B, W deferred by i chunks.
    Raises ``OptPipeError`` for another placement with stages that do not follow each other.
    """
    if _is_interleaved(problem):
        return _interleave(problem, "zb-h1", ahead=1, deferral=1)
    return _one_forward_one_backward(problem, "zb-h1", ahead=1, deferral=1)


def zb_h2(problem: Problem) -> Orders:
    """ZB-H2: twice the forwards ahead of 1F1B, W deferred by 2i microbatches.

    With several chunks a device the later devices of interleaved 1F1B run more forwards ahead, W
    deferred by 2i chunks. (On the first device there is no room for more: its forwards of the next
    group would wait for backwards that wait for it.)
    Raises ``OptPipeError`` for another placement with stages that do not follow each other.
    """
    if _is_interleaved(problem):
        return _interleave(problem, "zb-h2", ahead=2, deferral=2)
    return _one_forward_one_backward(problem, "zb-h2", ahead=2, deferral=2)


def interleaved(problem: Problem) -> Orders:
    """Megatron's interleaved 1F1B: groups of D microbatches, one chunk after the other.

    Raises ``OptPipeError`` unless ``stage_device`` is 0..D-1 repeated at least twice and the
    microbatches are a multiple of D.
    """
    if not _is_interleaved(problem):
        raise OptPipeError(
            f"interleaved: stage_device = {list(problem.stage_device)} must be "
            f"0..{problem.num_devices - 1} repeated at least twice; choose another method or "
            "placement"
        )
    return _interleave(problem, "interleaved", ahead=1, deferral=0)


CLASSIC_ORDERS: Mapping[str, Callable[[Problem], Orders]] = MappingProxyType(
    {
        "1f1b": one_f_one_b,
        "gpipe": gpipe,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
    }
)
"""Every classic schedule by the name a user types."""


def _one_forward_one_backward(problem: Problem, name: str, *, ahead: int, deferral: int) -> Orders:
    """Warm up with ``ahead`` forwards for every device behind, then F and B in turn, W late.

    A device that owns several consecutive stages runs them as one. W of the i-th device of the
    pipeline runs ``deferral * i`` microbatches after its B; what is left fills the cool-down.
    """
    chain = list(dict.fromkeys(problem.stage_device))
    if any(
        stages[-1] - stages[0] != len(stages) - 1
        for stages in map(problem.stages_on, range(problem.num_devices))
    ):
        raise OptPipeError(
            f"{name}: stage_device = {list(problem.stage_device)} gives a device stages that do "
            "not follow each other; choose another method, such as interleaved or greedy"
        )
    count = problem.num_microbatches
    lanes: list[tuple[Op, ...]] = [()] * problem.num_devices
    for index, device in enumerate(chain):
        stages = problem.stages_on(device)
        warmup = min(count, ahead * (len(chain) - 1 - index))
        lag = deferral * index
        lane: list[Op] = []
        for k in range(count + warmup + lag):
            j = k - warmup
            if k < count:
                lane += [Op("F", stage, k) for stage in stages]
            for stage in reversed(stages):
                if 0 <= j < count:
                    lane.append(Op("B", stage, j))
                if 0 <= j - lag < count:
                    lane.append(Op("W", stage, j - lag))
        lanes[device] = tuple(lane)
    return _compute_only(lanes)


def _is_interleaved(problem: Problem) -> bool:
    chunks = problem.num_stages // problem.num_devices
    return chunks >= 2 and problem.stage_device == tuple(range(problem.num_devices)) * chunks


def _interleave(problem: Problem, name: str, *, ahead: int, deferral: int) -> Orders:
    """Groups of D microbatches, one chunk after the other; F and B in turn after the warm-up.

    Beyond those that its other chunks ask for, the i-th device runs 2 (D - 1 - i) forwards ahead
    (``ahead`` 1, Megatron's), or 2 (D - 1) - i (``ahead`` 2); its W run ``deferral * i`` B late.
    """
    devices, count = problem.num_devices, problem.num_microbatches
    chunks = problem.num_stages // devices
    if count % devices:
        raise OptPipeError(
            f"{name}: num_microbatches = {count} must be a multiple of the {devices} devices; "
            "change the batch or choose another method"
        )
    total, period = count * chunks, devices * chunks

    def position(k: int, *, forward: bool) -> tuple[int, int]:
        chunk = (k % period) // devices
        return chunk if forward else chunks - 1 - chunk, k // period * devices + k % devices

    compute = []
    for device in range(devices):
        extra = 2 * (devices - device - 1) if ahead == 1 else 2 * (devices - 1) - device
        warmup = total if count == devices else min(total, extra + (chunks - 1) * devices)
        lag = deferral * device
        lane = []
        for k in range(warmup + total + lag):
            if k < total:
                chunk, j = position(k, forward=True)
                lane.append(Op("F", chunk * devices + device, j))
            if 0 <= k - warmup < total:
                chunk, j = position(k - warmup, forward=False)
                lane.append(Op("B", chunk * devices + device, j))
            if 0 <= k - warmup - lag < total:
                chunk, j = position(k - warmup - lag, forward=False)
                lane.append(Op("W", chunk * devices + device, j))
        compute.append(tuple(lane))
    return _compute_only(compute)


def _compute_only(compute: list[tuple[Op, ...]]) -> Orders:
    nothing: tuple[tuple[Op, ...], ...] = tuple(() for _ in compute)
    return Orders(compute=tuple(compute), offload=nothing, reload=nothing)
