"""Exact search for small problems: a shorter plan than the one in hand, or the proof of none.

Depth first over partial plans, ops started in the order of time. Below the horizon of the incumbent
every op has a latest start (time windows, forced orders and memory arcs, as in the MILP); a partial
plan in which some op misses it is dropped. So is one that another with the same ops is nowhere
behind. An op that could have started earlier without changing anything else waits until something
on its device or link has changed; so only plans that cannot be tightened are looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron_optpipe.core.check import check
from megatron_optpipe.core.errors import Deadlock, PlanError
from megatron_optpipe.core.op import COMPUTE, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import Orders, plan_from_starts, retime
from megatron_optpipe.planner.milp_windows import NothingBelow, Windows, tight_windows
from megatron_optpipe.planner.network import Network

SLACK_MS = 1e-7
BEAT_MS = 2e-6
"""How much shorter a plan must be to count; below what the contract can tell apart."""
Coming = tuple[tuple[float, int], ...]
Pool = tuple[int, float, Coming]
"""Bytes left, since when (the last allocation), and what returns later: (ms, bytes) in order."""


@dataclass(frozen=True, slots=True)
class ExactResult:
    """The best plan found (None: not better than the incumbent) and whether it is optimal."""

    plan: Plan | None
    proven: bool
    states: int


class _OutOfBudget(Exception):
    pass


def solve_exactly(
    problem: Problem,
    incumbent: Plan | None,
    time_limit_s: float,
    max_states: int = 1_000_000,
) -> ExactResult:
    """Improve until proven or out of budget. Meant for at most about 4 x 4 (3 x 4 with offload).

    Without an incumbent: ``proven`` and no plan means that no plan exists.
    """
    deadline = time.monotonic() + time_limit_s
    best = incumbent
    found: Plan | None = None
    states = 0
    network = Network.of_compute(problem)
    total = 2 * sum(network.duration_ms) + sum(lag for _, _, lag in network.arcs) + 1.0
    for s in range(problem.num_stages):
        if problem.can_offload(s):
            total += problem.num_microbatches * sum(
                problem.duration_ms(Op(kind, s, 0)) for kind in "OR"
            )
    while True:
        horizon = best.makespan_ms - BEAT_MS if best is not None else total
        try:
            windows = tight_windows(network, [], horizon)
        except NothingBelow:
            return ExactResult(found, True, states)
        search = _Search(problem, network, windows, deadline, max_states - states)
        try:
            starts = search.run()
        except _OutOfBudget:
            return ExactResult(found, False, states + search.states)
        states += search.states
        if starts is None:
            return ExactResult(found, True, states)
        plan = _plan(problem, starts)
        if plan is None or (best is not None and plan.makespan_ms >= best.makespan_ms):
            return ExactResult(found, False, states)  # a defect of the search: claim nothing
        best = found = plan


def _plan(problem: Problem, starts: dict[Op, float]) -> Plan | None:
    lanes: dict[str, list[list[Op]]] = {k: [[] for _ in problem.devices] for k in "COR"}
    for op in starts:  # in the order in which the search started them
        lanes["C" if op.kind in COMPUTE else op.kind][problem.device_of(op.stage)].append(op)
    orders = Orders(*(tuple(tuple(lane) for lane in lanes[k]) for k in "COR"))
    try:
        plan = plan_from_starts(problem, orders, starts, "exact")
        if check(problem, plan):
            return None
        tidy = retime(problem, plan)
    except (Deadlock, PlanError):
        return None
    return plan if tidy.makespan_ms > plan.makespan_ms or check(problem, tidy) else tidy


class _Search:
    """One pass below one horizon; stops at the first plan."""

    def __init__(
        self, problem: Problem, network: Network, windows: Windows, deadline: float, budget: int
    ) -> None:
        self.problem, self.deadline, self.budget = problem, deadline, budget
        self.states = 0
        self.many = problem.num_microbatches
        self.ops = list(network.ops)
        self.index = dict(network.index)
        self.latest = [late + SLACK_MS for late in windows.latest_ms]
        for s in range(problem.num_stages):
            if problem.can_offload(s):
                for j in range(self.many):
                    self._add_transfers(s, j)
        count = len(self.ops)
        self.lasts = [problem.duration_ms(op) for op in self.ops]
        names: dict[str, int] = {}
        self.resource: list[int] = []
        for op in self.ops:
            d = problem.device_of(op.stage)
            name = f"device {d}" if op.kind in COMPUTE else f"link {problem.link_name(op)}"
            self.resource.append(names.setdefault(name, len(names)))
        self.num_resources = len(names)
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        self.needs = [0] * count
        for a, b, lag in [*network.arcs, *windows.forced]:
            self.needs[b] |= 1 << a
            self.after[b].append((a, lag))
        self.max_lag = max((lag for _, _, lag in network.arcs), default=0.0)
        self.all_compute = (1 << len(network.ops)) - 1
        self._pools()
        self._viewers()

    def _add_transfers(self, s: int, j: int) -> None:
        b = self.index[Op("B", s, j)]
        back = self.latest[b] - self.problem.duration_ms(Op("R", s, j))
        for op, late in (
            (Op("O", s, j), back - self.problem.duration_ms(Op("O", s, j))),
            (Op("R", s, j), back),
        ):
            self.index[op] = len(self.ops)
            self.ops.append(op)
            self.latest.append(late)

    def _pools(self) -> None:
        """What ops take and give: devices, then the host where it is limited."""
        host = self.problem.num_devices
        self.sizes = [device.memory_bytes for device in self.problem.devices]
        if self.problem.host_memory_bytes is not None:
            self.sizes.append(self.problem.host_memory_bytes)
        self.takes: list[tuple[tuple[int, int], ...]] = []
        self.gives: list[tuple[tuple[int, int], ...]] = []
        for op in self.ops:
            d, change = self.problem.device_of(op.stage), self.problem.memory_change(op)
            takes = [(d, change.at_start_bytes)] if change.at_start_bytes else []
            gives = [(d, -change.at_end_bytes)] if change.at_end_bytes else []
            if host < len(self.sizes) and op.kind not in COMPUTE:
                wire = self.problem.stages[op.stage].wire_bytes
                (takes if op.kind == "O" else gives).append((host, wire))
            self.takes.append(tuple(takes))
            self.gives.append(tuple(gives))

    def _viewers(self) -> None:
        """For every op, the ops after whose starts nobody looks at its end any more."""
        self.viewers = [1 << len(self.ops)] * len(self.ops)
        for op, i in self.index.items():
            _, s, j = op
            if op.kind == "F" or op.kind == "R":
                seen = [Op("B", s, j)]
            elif op.kind == "O":
                seen = [Op("R", s, j)]
            elif op.kind == "B":
                seen = [Op("W", s, j)] + ([Op("B", s - 1, j)] if s else [])
            else:
                seen = [Op("W", s, j + 1)]
            if all(other in self.index for other in seen):
                self.viewers[i] = sum(1 << self.index[other] for other in seen)

    def run(self) -> dict[Op, float] | None:
        """Starts of a plan below the horizon, in the order of starting, or None."""
        self.end = [0.0] * len(self.ops)
        self.trail: list[tuple[int, float]] = []
        self.seen: dict[int, list[tuple[int, int, list[float]]]] = {}
        pools: list[Pool] = [(size, 0.0, ()) for size in self.sizes]
        if not self._extend(0, 0.0, [0.0] * self.num_resources, pools):
            return None
        return {self.ops[i]: start for i, start in self.trail}

    def _extend(self, started: int, now: float, free: list[float], pools: list[Pool]) -> bool:
        if started & self.all_compute == self.all_compute:
            return True
        missed, choices = 0, []
        for i in self._open(started):
            natural = self._natural(i, free, pools)
            if natural is None:
                continue
            if natural > self.latest[i]:
                if self.ops[i].kind != "O":
                    return False
            elif natural < now - SLACK_MS:
                missed |= 1 << i
                if now > self.latest[i] and self.ops[i].kind != "O":
                    return False
            else:
                choices.append((max(natural, now), i))
        if not self._is_new(started, now, missed):
            return False
        self.states += 1
        if self.states > self.budget or (
            self.states % 256 == 0 and time.monotonic() > self.deadline
        ):
            raise _OutOfBudget
        first = self._first_without_memory(started, choices)
        choices.sort(key=lambda item: (self.ops[item[1]].kind in "OR", item[0], item[1]))
        for start, i in choices:
            end, harmless = first.get(self.resource[i], (start + 1.0, i))
            if start >= end and i != harmless:
                continue
            before = self.end[i]
            self.end[i] = start + self.lasts[i]
            self.trail.append((i, start))
            then_free = list(free)
            then_free[self.resource[i]] = self.end[i]
            if self._extend(started | 1 << i, start, then_free, self._use(pools, i, start)):
                return True
            self.trail.pop()
            self.end[i] = before
        return False

    def _open(self, started: int) -> list[int]:
        """Ops all of whose needs have been started; transfers of a stage in microbatch order."""
        ready: list[int] = []
        for i in range(self.all_compute.bit_length()):
            if not started >> i & 1 and started & self.needs[i] == self.needs[i]:
                op = self.ops[i]
                out = self.index.get(Op("O", op.stage, op.microbatch))
                if (
                    op.kind == "B"
                    and out is not None
                    and started >> out & 1
                    and not started >> self.index[Op("R", op.stage, op.microbatch)] & 1
                ):
                    continue
                ready.append(i)
        for s in range(self.problem.num_stages):
            if not self.problem.can_offload(s):
                continue
            waiting = False
            for j in range(self.many):
                out, back = self.index[Op("O", s, j)], self.index[Op("R", s, j)]
                if started >> out & 1:
                    for k in range(j):  # earlier microbatches may not leave any more
                        earlier = self.index[Op("O", s, k)]
                        if earlier in ready:
                            ready.remove(earlier)
                    if not started >> back & 1 and not waiting:
                        waiting = True
                        ready.append(back)
                elif (
                    started >> self.index[Op("F", s, j)] & 1
                    and not started >> self.index[Op("B", s, j)] & 1
                ):
                    ready.append(out)
        return ready

    def _natural(self, i: int, free: list[float], pools: list[Pool]) -> float | None:
        """Earliest start that changes nothing that was started; None: memory never fits yet."""
        start = free[self.resource[i]]
        for a, lag in self.after[i]:
            start = max(start, self.end[a] + lag)
        op = self.ops[i]
        if op.kind not in COMPUTE:
            start = max(start, self.end[self.index[Op("F", op.stage, op.microbatch)]])
            if op.kind == "R":
                start = max(start, self.end[self.index[Op("O", op.stage, op.microbatch)]])
        elif op.kind == "B" and self.problem.can_offload(op.stage):
            start = max(start, self.end[self.index[Op("R", op.stage, op.microbatch)]])
        for pool, size in self.takes[i]:
            left, since, coming = pools[pool]
            start = max(start, since)
            for at, returned in coming:
                if left >= size:
                    break
                left += returned
                start = max(start, at)
            if left < size:
                return None
        return start

    def _use(self, pools: list[Pool], i: int, start: float) -> list[Pool]:
        after = list(pools)
        for pool, size in self.takes[i]:
            left, _, coming = after[pool]
            here = sum(returned for at, returned in coming if at <= start + 1e-9)
            later = tuple(entry for entry in coming if entry[0] > start + 1e-9)
            after[pool] = (left + here - size, start, later)
        for pool, size in self.gives[i]:
            left, since, coming = after[pool]
            after[pool] = (left, since, tuple(sorted((*coming, (self.end[i], size)))))
        return after

    def _first_without_memory(
        self, started: int, choices: list[tuple[float, int]]
    ) -> dict[int, tuple[float, int]]:
        """For each resource the op that could end first and that nobody minds going first."""
        first: dict[int, tuple[float, int]] = {}
        for start, i in choices:
            op = self.ops[i]
            out = self.index.get(Op("O", op.stage, op.microbatch))
            harmless = op.kind == "W" or (
                op.kind == "B"
                and not self.takes[i]
                and (out is None or bool(started >> out & 1))  # a B ends the chance to leave
            )
            if harmless:
                entry = (start + self.lasts[i], i)
                r = self.resource[i]
                first[r] = min(first.get(r, entry), entry)
        return first

    def _is_new(self, started: int, now: float, missed: int) -> bool:
        """False if a partial plan with the same ops was nowhere behind this one.

        What an activation did before its B has started does not matter any more, so transfers of
        such activations are left out.
        """
        key = started
        for op, i in self.index.items():
            if op.kind in "OR" and started >> self.index[Op("B", op.stage, op.microbatch)] & 1:
                key &= ~(1 << i)
        floor = now - self.max_lag
        view = [now]
        for i, viewers in enumerate(self.viewers):
            if key >> i & 1 and started & viewers != viewers:
                view.append(max(self.end[i], floor))
        known = self.seen.setdefault(key, [])
        for _, other_missed, other in known:
            if other_missed & ~missed == 0 and all(a <= b + 1e-9 for a, b in zip(other, view)):
                return False
        known.append((started, missed, view))
        return True
