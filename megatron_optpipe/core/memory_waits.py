"""The waits that keep the memory limit of a device however slow a transfer is (rule 7).

An allocation must wait for a release where some timing, which all other waits allow, would exceed
the limit without it; and only there. Ops of a device are taken in planned order. For an allocation,
the worst moment is looked for among the cuts in which it is the latest allocation that has
happened: its own lane stands at it, the other allocating lane stands anywhere it may, and nothing
has been released but what the two are known to follow. While that exceeds the limit, the next
release that the plan has before the allocation is added to its waits. Later waits only touch later
allocations, so each wait stays needed; that the limit holds follows cut by cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from megatron_optpipe.core.op import TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import DevicePlan
from megatron_optpipe.core.problem import Problem

LANES = ("compute", "offload", "reload")
COMPUTE_LANE, OFFLOAD_LANE, RELOAD_LANE = range(3)


class Known(NamedTuple):
    """How many ops of each lane of the device are known to have ended."""

    compute: int = 0
    offload: int = 0
    reload: int = 0


def _merge(one: Known, two: Known) -> Known:
    return Known(*map(max, one, two))


class _Lane:
    """One lane: its ops, their ends, and running totals of what they take and give."""

    def __init__(self, problem: Problem, ops: tuple[tuple[Op, float], ...]) -> None:
        changes = [problem.memory_change(op) for op, _ in ops]
        self.ops = [op for op, _ in ops]
        self.starts_ms = [at for _, at in ops]
        self.ends_ms = [at + problem.duration_ms(op) for op, at in ops]
        self.takes = [change.at_start_bytes for change in changes]
        self.taken_bytes = [0, *accumulate(self.takes)]
        self.given_bytes = [0, *accumulate(-change.at_end_bytes for change in changes)]

    def started_before(self, time_ms: float) -> int:
        return bisect_right(self.starts_ms, time_ms + TIME_TOLERANCE_MS)

    def ended_by(self, time_ms: float) -> int:
        return bisect_right(self.ends_ms, time_ms + TIME_TOLERANCE_MS)


def memory_waits(
    problem: Problem, index: int, device: DevicePlan, waits: Mapping[Op, list[Op]]
) -> dict[Op, list[Op]]:
    """The waits to add to ``waits`` (data and links) so that device ``index`` keeps its limit."""
    lanes = [_Lane(problem, lane) for _, lane in device.lanes()]
    limit = problem.devices[index].memory_bytes
    found: dict[Op, list[Op]] = {}
    begin: dict[Op, Known] = {}
    end: dict[Op, Known] = {}
    # Zero-length ops first at equal times, then releasing lanes: what an op needs is done by then.
    order = sorted(
        (lane.starts_ms[i], lane.ends_ms[i], (0, 1, 2)[which], i, which)
        for which, lane in enumerate(lanes)
        for i in range(len(lane.ops))
    )
    for at, _, _, i, which in order:
        op = lanes[which].ops[i]
        known = end[lanes[which].ops[i - 1]] if i else Known()
        for need in waits.get(op, ()):
            known = _merge(known, end.get(need, Known()))
        if lanes[which].takes[i]:
            other = lanes[RELOAD_LANE if which == COMPUTE_LANE else COMPUTE_LANE]
            search = _Search(lanes, begin, which, i, other, limit)
            for need in search.missing(at, known):
                found.setdefault(op, []).append(need)
                known = _merge(known, end[need])
        begin[op] = known
        end[op] = known._replace(**{LANES[which]: i + 1})
    return found


class _Search:
    """The cuts in which one allocation is the latest, and the releases that they lack."""

    def __init__(
        self,
        lanes: list[_Lane],
        begin: Mapping[Op, Known],
        which: int,
        place: int,
        other: _Lane,
        limit_bytes: int,
    ) -> None:
        self._lanes = lanes
        self._begin = begin
        self._which = which
        self._other = other
        self._other_index = RELOAD_LANE if which == COMPUTE_LANE else COMPUTE_LANE
        self._room_bytes = limit_bytes - lanes[which].taken_bytes[place + 1]

    def missing(self, at_ms: float, known: Known) -> list[Op]:
        """The fewest releases to wait for: at most one of each releasing lane."""
        compute, offload = self._lanes[COMPUTE_LANE], self._lanes[OFFLOAD_LANE]
        last = self._other.started_before(at_ms)
        while last and self._other.ops[last - 1] not in self._begin:
            last -= 1
        # A cut that holds with less known holds with more: only the others stay to be looked at.
        cuts = [c for c in range(known[self._other_index], last + 1) if not self._fits(c, known)]
        if not cuts:
            return []
        most_compute, most_offload = known.compute, max(known.offload, offload.ended_by(at_ms))
        if self._which != COMPUTE_LANE:
            most_compute = max(most_compute, compute.ended_by(at_ms))

        def holds(wanted: Known) -> bool:
            return all(self._fits(cut, wanted) for cut in cuts)

        few_offload = known.offload
        while few_offload < most_offload and not holds(
            known._replace(compute=most_compute, offload=few_offload)
        ):
            few_offload += 1
        few_compute = known.compute
        while few_compute < most_compute and not holds(
            known._replace(compute=few_compute, offload=few_offload)
        ):
            few_compute += 1
        needs = []
        if few_offload > known.offload:
            needs.append(offload.ops[few_offload - 1])
        if few_compute > known.compute:
            needs.append(compute.ops[few_compute - 1])
        return needs

    def _fits(self, cut: int, known: Known) -> bool:
        """Whether memory holds with the other lane's first ``cut`` ops begun."""
        if cut:
            known = _merge(known, self._begin[self._other.ops[cut - 1]])
        given = (
            self._lanes[COMPUTE_LANE].given_bytes[known.compute]
            + self._lanes[OFFLOAD_LANE].given_bytes[known.offload]
        )
        return self._other.taken_bytes[cut] - given <= self._room_bytes
