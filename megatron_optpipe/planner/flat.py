"""A problem as flat arrays of whole numbers, the form in which schedules are built quickly.

Times become ticks (the longest op lasts 2**24; less where there are very many ops, or transfers far
longer than ops), so that sums are exact, ties are ties, and a change of the time unit changes
nothing. ``mirror`` reads the problem backwards in time: a pipeline schedule turned round is again
a pipeline schedule, with B before F and W before B.

Both readings have the same form: X runs up the stages, Y comes back down, Z belongs to Y (forward
reading: X, Y, Z = F, B, W) or comes before X (mirrored: X, Y, Z = B, F, W). Between X and Y of one
stage the activations may leave the device ("out") and come back ("back").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Problem

LONGEST_TICKS = 1 << 24
MAX_TOTAL_TICKS = 1 << 41
"""All ops one after another: the scheduler packs a time and what happens then into 63 bits."""
FEWEST_TICKS = 1 << 4
"""Ticks of the longest op below which a schedule would be too coarse."""
NO_LIMIT = 1 << 60


class Flat(NamedTuple):
    """One reading of a problem; ``Ints`` are indexed by stage unless said otherwise."""

    num_stages: int
    num_microbatches: int
    num_devices: int
    num_links: int
    z_first: int
    """1: Z comes before X (mirrored reading)."""
    rely: int
    """1: whatever may leave the device may be counted on to leave when memory is short."""
    in_flight: int
    """At most so many microbatches between the start of X(0) and the start of Y(0)."""
    host_bytes: int
    device: Sequence[int]
    first: Sequence[int]
    """By device: where its stages begin in ``owned`` (one more entry at the end)."""
    owned: Sequence[int]
    """Stages of device 0 in model order, then of device 1, ..."""
    x_ticks: Sequence[int]
    y_ticks: Sequence[int]
    z_ticks: Sequence[int]
    out_ticks: Sequence[int]
    back_ticks: Sequence[int]
    x_hop: Sequence[int]
    """From X of the stage before; 0 for stage 0."""
    y_hop: Sequence[int]
    """From Y of the stage after; 0 for the last stage."""
    x_takes: Sequence[int]
    x_gives: Sequence[int]
    y_takes: Sequence[int]
    y_gives: Sequence[int]
    z_takes: Sequence[int]
    z_gives: Sequence[int]
    holds: Sequence[int]
    """Bytes held between X and Y."""
    moves: Sequence[int]
    """Bytes that leave the device; 0 where nothing may."""
    wire: Sequence[int]
    memory: Sequence[int]
    """By device."""
    alone: Sequence[int]
    """By device: the peak of one microbatch that has the device to itself."""
    uneven: Sequence[int]
    """By device: 1 where one microbatch holds more at one time than at the turn, because some of
    it may leave or some op takes memory for a while."""
    out_link: Sequence[int]
    """By device; -1: none."""
    back_link: Sequence[int]
    """By device; -1: none."""
    x_path: Sequence[int]
    """Earliest start of X after the start of X(0)."""
    y_path: Sequence[int]
    """Earliest readiness of Y after the start of Y of the last stage."""


@dataclass(frozen=True)
class Readings:
    """A problem in both directions of time, and the length of a tick."""

    forward: Flat
    mirrored: Flat
    tick_ms: float


def readings(
    problem: Problem,
    *,
    rely: bool = True,
    in_flight: int | None = None,
    moves: list[int] | None = None,
) -> Readings:
    """Flatten ``problem``. ``rely``, ``in_flight`` and ``moves``: see ``Flat``."""
    tick_ms = _tick_ms(problem)
    names = sorted({n for d in problem.devices for n in (d.d2h, d.h2d) if n is not None})
    link_index = {name: index for index, name in enumerate(names)}
    links = [
        (
            -1 if d.d2h is None else link_index[d.d2h],
            -1 if d.h2d is None else link_index[d.h2d],
        )
        for d in problem.devices
    ]

    def ticks(kind: str) -> list[int]:
        return [
            max(round(problem.duration_ms(Op(kind, s, 0)) / tick_ms), int(kind in "FB"))
            if kind in "FBW" or problem.can_offload(s)
            else 0
            for s in range(problem.num_stages)
        ]

    def hops(step: int) -> list[int]:
        out = []
        for s, owner in enumerate(problem.stage_device):
            inside = 0 <= s + step < problem.num_stages
            hop = problem.hop_ms(problem.stage_device[s + step], owner) if inside else 0.0
            out.append(round(hop / tick_ms))
        return out

    first = [0]
    owned: list[int] = []
    for d in range(problem.num_devices):
        owned += problem.stages_on(d)
        first.append(len(owned))
    holds = [s.activation_bytes for s in problem.stages]
    frees = [s.backward_frees_bytes for s in problem.stages]
    if moves is None:
        moves = [
            stage.offload_bytes if problem.can_offload(s) else 0
            for s, stage in enumerate(problem.stages)
        ]
    leaving = moves
    zero = [0] * problem.num_stages
    gain = [max(0, b) for b in frees]
    need = [max(0, -b) for b in frees]
    rest = [a - b for a, b in zip(holds, frees)]
    f_ticks, b_ticks, w_ticks = ticks("F"), ticks("B"), ticks("W")
    o_ticks, r_ticks = ticks("O"), ticks("R")
    f_hop, b_hop = hops(-1), hops(1)

    def flat(
        mirror: bool,
        x: list[int],
        y: list[int],
        x_hop: list[int],
        y_hop: list[int],
    ) -> Flat:
        last = problem.num_stages - 1
        x_path, y_path = [0], [0] * (last + 1)
        for s in range(1, last + 1):
            x_path.append(x_path[-1] + x[s - 1] + x_hop[s])
        for s in range(last - 1, -1, -1):
            y_path[s] = y_path[s + 1] + y[s + 1] + y_hop[s]
        return Flat(
            num_stages=problem.num_stages,
            num_microbatches=problem.num_microbatches,
            num_devices=problem.num_devices,
            num_links=len(names),
            z_first=int(mirror),
            rely=int(rely),
            in_flight=problem.num_microbatches if in_flight is None else in_flight,
            host_bytes=NO_LIMIT if problem.host_memory_bytes is None else problem.host_memory_bytes,
            device=list(problem.stage_device),
            first=first,
            owned=owned,
            x_ticks=x,
            y_ticks=y,
            z_ticks=w_ticks,
            out_ticks=r_ticks if mirror else o_ticks,
            back_ticks=o_ticks if mirror else r_ticks,
            x_hop=x_hop,
            y_hop=y_hop,
            x_takes=gain if mirror else holds,
            x_gives=need if mirror else zero,
            y_takes=zero if mirror else need,
            y_gives=holds if mirror else gain,
            z_takes=rest if mirror else zero,
            z_gives=zero if mirror else rest,
            holds=holds,
            moves=leaving,
            wire=[stage.wire_bytes for stage in problem.stages],
            memory=[d.memory_bytes for d in problem.devices],
            alone=[
                alone_bytes(problem, d, leaving if rely else zero)
                for d in range(problem.num_devices)
            ],
            uneven=[
                int(any(leaving[s] or need[s] for s in problem.stages_on(d)))
                for d in range(problem.num_devices)
            ],
            out_link=[h2d if mirror else d2h for d2h, h2d in links],
            back_link=[d2h if mirror else h2d for d2h, h2d in links],
            x_path=x_path,
            y_path=y_path,
        )

    # Backwards in time the hop into F(s) leaves F(s) towards stage s-1, and so on: shifted by one.
    return Readings(
        forward=flat(False, f_ticks, b_ticks, f_hop, b_hop),
        mirrored=flat(True, b_ticks, f_ticks, [0] + b_hop[:-1], f_hop[1:] + [0]),
        tick_ms=tick_ms,
    )


def _tick_ms(problem: Problem) -> float:
    """Length of a tick: the longest op over a power of two. Raises ``OptPipeError``."""
    longest = max(
        max(s.forward_ms, s.backward_input_ms, s.backward_weight_ms) for s in problem.stages
    )
    hop = problem.p2p_ms
    one = 2 * problem.num_stages * (max(map(max, hop)) if isinstance(hop, tuple) else hop)
    for s in range(problem.num_stages):
        kinds = "FBWOR" if problem.can_offload(s) else "FBW"
        one += sum(problem.duration_ms(Op(kind, s, 0)) for kind in kinds)
    total = one * problem.num_microbatches / longest
    ticks = LONGEST_TICKS
    while ticks * total > MAX_TOTAL_TICKS:
        ticks >>= 1
    if ticks < FEWEST_TICKS:
        raise OptPipeError(
            f"all ops and transfers one after another take {total:.3g} times the longest F, B or "
            f"W: must be at most {MAX_TOTAL_TICKS / FEWEST_TICKS:.3g}, to be planned; correct gbps "
            "and times, leave out offload_bytes, or plan fewer microbatches"
        )
    return longest / ticks


def alone_bytes(problem: Problem, device: int, moves: Sequence[int]) -> int:
    """Least peak of ``device`` for one microbatch alone, if ``moves`` bytes of each stage leave.

    While F(s) or B(s) runs, the lower stages of the device hold what cannot leave, stage s all;
    no plan does with less.
    """
    below = peak = 0
    for s in problem.stages_on(device):
        stage = problem.stages[s]
        peak = max(peak, below + stage.activation_bytes + max(0, -stage.backward_frees_bytes))
        below += stage.activation_bytes - moves[s]
    return peak
