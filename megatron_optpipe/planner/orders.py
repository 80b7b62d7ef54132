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

    Raises ``OptPipeError`` where a device owns stages that do not follow each other.
    """
    return _one_forward_one_backward(problem, "zb-h1", ahead=1, deferral=1)


def zb_h2(problem: Problem) -> Orders:
    """ZB-H2: twice the forwards ahead of 1F1B, W deferred by 2i microbatches.

    Raises ``OptPipeError`` where a device owns stages that do not follow each other.
    """
    return _one_forward_one_backward(problem, "zb-h2", ahead=2, deferral=2)


def interleaved(problem: Problem) -> Orders:
    """Megatron's interleaved 1F1B: groups of D microbatches, one chunk after the other.

    Raises ``OptPipeError`` unless ``stage_device`` is 0..D-1 repeated at least twice and the
    microbatches are a multiple of D.
    """
    devices, count = problem.num_devices, problem.num_microbatches
    chunks = problem.num_stages // devices
    if chunks < 2 or problem.stage_device != tuple(range(devices)) * chunks:
        raise OptPipeError(
            f"interleaved: stage_device = {list(problem.stage_device)} must be 0..{devices - 1} "
            "repeated at least twice; choose another method or placement"
        )
    if count % devices:
        raise OptPipeError(
            f"interleaved: num_microbatches = {count} must be a multiple of the {devices} devices; "
            "change the batch or choose another method"
        )
    total, period = count * chunks, devices * chunks

    def position(k: int, *, forward: bool) -> tuple[int, int]:
        chunk = (k % period) // devices
        return chunk if forward else chunks - 1 - chunk, k // period * devices + k % devices

    compute = []
    for device in range(devices):
        if count == devices:
            warmup = total
        else:
            warmup = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)
        lane = []
        for k in range(warmup + total):
            if k < total:
                chunk, j = position(k, forward=True)
                lane.append(Op("F", chunk * devices + device, j))
            if k >= warmup:
                chunk, j = position(k - warmup, forward=False)
                stage = chunk * devices + device
                lane += [Op("B", stage, j), Op("W", stage, j)]
        compute.append(tuple(lane))
    return _compute_only(compute)


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


def _one_forward_one_backward(
    problem: Problem, name: str, *, ahead: int, deferral: int
) -> Orders:
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


def _compute_only(compute: list[tuple[Op, ...]]) -> Orders:
    nothing: tuple[tuple[Op, ...], ...] = tuple(() for _ in compute)
    return Orders(compute=tuple(compute), offload=nothing, reload=nothing)
