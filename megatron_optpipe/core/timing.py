"""Orders in, earliest times out; and the figures of a plan: makespan, bubble, peaks.

``time_orders`` gives a clock to orders made by anyone. ``retime`` gives a plan a new clock for
changed durations, keeping its orders and waits. Both say who waits for whom if nobody can move.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from megatron_optpipe.core.arrows import cross_lane_waits
from megatron_optpipe.core.deadlock import describe_cycle
from megatron_optpipe.core.errors import Deadlock, PlanError
from megatron_optpipe.core.op import COMPUTE, TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import DevicePlan, Plan, TimedOp
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.program import input_of

Lane = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """Execution order of every lane, one inner tuple a device; no times."""

    compute: tuple[Lane, ...]
    offload: tuple[Lane, ...]
    reload: tuple[Lane, ...]

    @classmethod
    def without_offload(cls, compute: tuple[Lane, ...]) -> Orders:
        """Orders that never move an activation."""
        empty: tuple[Lane, ...] = tuple(() for _ in compute)
        return cls(compute, empty, empty)

    @classmethod
    def of(cls, plan: Plan) -> Orders:
        """The orders of a plan."""
        return cls(
            tuple(tuple(op for op, _ in device.compute) for device in plan.devices),
            tuple(tuple(op for op, _ in device.offload) for device in plan.devices),
            tuple(tuple(op for op, _ in device.reload) for device in plan.devices),
        )

    def lanes(self) -> list[Lane]:
        """All lanes, compute first."""
        return [*self.compute, *self.offload, *self.reload]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a plan; tuples have one entry a device (the contract, rules 7 to 9)."""

    makespan_ms: float
    bubble: float
    bubble_of: tuple[float, ...]
    own_span_ms: tuple[float, ...]
    busy_ms: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    """Bytes over the link for the offloads of a device (each comes back once)."""
    host_peak_bytes: int


def data_needs(problem: Problem, op: Op) -> list[tuple[Op, float]]:
    """What a compute op needs by rules 2 to 4, each with the hop in ms."""
    needs: list[tuple[Op, float]] = []
    source = input_of(problem, op)
    if source is not None:
        hop = problem.hop_ms(problem.device_of(source.stage), problem.device_of(op.stage))
        needs.append((source, hop))
    if op.kind == "B":
        needs.append((Op("F", op.stage, op.microbatch), 0.0))
    elif op.kind == "W":
        needs.append((Op("B", op.stage, op.microbatch), 0.0))
    return needs


def time_orders(problem: Problem, orders: Orders, *, method: str, obey_memory: bool = True) -> Plan:
    """The earliest times of ``orders`` (rules 1 to 6); allocations wait until they fit (rule 7)
    when ``obey_memory``, and a reload also until it leaves room for the compute ops ahead of its B.
    Rule 8 is not obeyed here; ``check`` tells. Raises ``Deadlock`` saying who waits for whom."""
    return _Clock(problem, orders, obey_memory).run(method)


class _Clock:
    """Event simulation of orders: ops start in the order of time, each as early as it may."""

    def __init__(self, problem: Problem, orders: Orders, obey_memory: bool) -> None:
        self.problem = problem
        self.orders = orders
        self.obey_memory = obey_memory
        self.lanes = orders.lanes()
        self.lane_of = {op: index for index, lane in enumerate(self.lanes) for op in lane}
        self.reloads = {op for lane in orders.reload for op in lane}
        self.next = [0] * len(self.lanes)
        self.start: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.link_free: dict[str, float] = defaultdict(float)
        self.held = [0] * problem.num_devices
        self.releases: list[list[tuple[float, int]]] = [[] for _ in problem.devices]
        self.parked: list[set[int]] = [set() for _ in problem.devices]
        self.place = {op: at for lane in orders.compute for at, op in enumerate(lane)}
        self.make_room = True
        self.waiters: dict[Op, list[int]] = defaultdict(list)
        self.heap: list[tuple[float, int, int]] = []

    def needs(self, op: Op) -> list[tuple[Op, float]]:
        if op.kind == "O":
            return [(Op("F", op.stage, op.microbatch), 0.0)]
        if op.kind == "R":
            return [(Op("O", op.stage, op.microbatch), 0.0)]
        needs = data_needs(self.problem, op)
        back = Op("R", op.stage, op.microbatch)
        if op.kind == "B" and back in self.reloads:
            needs.append((back, 0.0))
        return needs

    def offer(self, lane: int) -> None:
        """Put the next op of a lane on the heap, or register whom it waits for."""
        if self.next[lane] >= len(self.lanes[lane]):
            return
        op = self.lanes[lane][self.next[lane]]
        ready = self.end[self.lanes[lane][self.next[lane] - 1]] if self.next[lane] else 0.0
        for need, hop in self.needs(op):
            if need not in self.end:
                self.waiters[need].append(lane)
                return
            ready = max(ready, self.end[need] + hop)
        if op.kind in ("O", "R"):
            ready = max(ready, self.link_free[self.problem.link_name(op)])
        # Of equal times a reload goes first: it leads to a release, a forward does not.
        heapq.heappush(self.heap, (ready, 0 if op.kind == "R" else 1, lane))

    def run(self, method: str) -> Plan:
        for lane in range(len(self.lanes)):
            self.offer(lane)
        now = 0.0
        while self.heap or self.force_a_reload(now):
            at, _, lane = heapq.heappop(self.heap)
            now = max(now, at)
            self.try_start(at, lane)
            self.make_room = True
        if len(self.end) < len(self.lane_of):
            raise Deadlock(self.describe())
        return plan_from_starts(self.problem, self.orders, self.start, method)

    def force_a_reload(self, now: float) -> bool:
        """When nobody else can move, let a parked reload go that fits but leaves no room."""
        for device, lanes in enumerate(self.parked):
            room = self.problem.devices[device].memory_bytes - self.held[device]
            for lane in sorted(lanes):
                op = self.lanes[lane][self.next[lane]]
                if op.kind == "R" and self.problem.memory_change(op).at_start_bytes <= room:
                    lanes.remove(lane)
                    heapq.heappush(self.heap, (now, 0, lane))
                    self.make_room = False
                    return True
        return False

    def ahead_bytes(self, reload: Op) -> int:
        """The most that the compute ops between now and the B of a reload will hold on top."""
        device = self.problem.device_of(reload.stage)
        last = self.place[Op("B", reload.stage, reload.microbatch)]
        held = peak = 0
        for op in self.orders.compute[device][self.next[device] : last]:
            taken, given = self.problem.memory_change(op)
            held += taken
            peak = max(peak, held)
            held += given
        return peak

    def try_start(self, at: float, lane: int) -> None:
        op = self.lanes[lane][self.next[lane]]
        problem, device = self.problem, self.problem.device_of(op.stage)
        link = problem.link_name(op) if op.kind in ("O", "R") else None
        if link is not None and self.link_free[link] > at:
            heapq.heappush(self.heap, (self.link_free[link], 0 if op.kind == "R" else 1, lane))
            return
        taken, given = problem.memory_change(op)
        if self.obey_memory and taken:
            pending = self.releases[device]
            while pending and pending[0][0] <= at + TIME_TOLERANCE_MS:
                self.held[device] -= heapq.heappop(pending)[1]
            ahead = self.ahead_bytes(op) if op.kind == "R" and self.make_room else 0
            if self.held[device] + taken + ahead > problem.devices[device].memory_bytes:
                if pending:
                    heapq.heappush(self.heap, (pending[0][0], 0 if op.kind == "R" else 1, lane))
                else:
                    self.parked[device].add(lane)
                return
            self.held[device] += taken
        self.start[op] = at
        self.end[op] = end = at + problem.duration_ms(op)
        if link is not None:
            self.link_free[link] = end
        if self.obey_memory and given:
            heapq.heappush(self.releases[device], (end, -given))
            for waiting in sorted(self.parked[device]):
                heapq.heappush(self.heap, (end, 1, waiting))
            self.parked[device].clear()
        self.next[lane] += 1
        self.offer(lane)
        for waiting in self.waiters.pop(op, ()):
            self.offer(waiting)

    def describe(self) -> str:
        heads = {}
        for lane, position in enumerate(self.next):
            if position < len(self.lanes[lane]):
                heads[lane] = self.lanes[lane][position]
        waits: dict[Op, tuple[Op | None, str]] = {}
        for op in heads.values():
            missing = [need for need, _ in self.needs(op) if need not in self.end]
            device = self.problem.device_of(op.stage)
            if missing:
                waits[op] = (missing[0], f"needs {missing[0]}")
            else:
                taken = self.problem.memory_change(op).at_start_bytes
                limit = self.problem.devices[device].memory_bytes
                waits[op] = (
                    None,
                    f"needs {taken} bytes, but {self.held[device]} of memory_bytes = {limit} on "
                    f"device {device} are held and nothing before it gives any back",
                )
        head_of = {op: heads[self.lane_of[op]] for op in self.lane_of if self.lane_of[op] in heads}
        return describe_cycle(waits, head_of)


def plan_from_starts(problem: Problem, orders: Orders, start: dict[Op, float], method: str) -> Plan:
    """A plan from orders and the start of every op; the first compute op is moved to 0."""
    shift = min(start[lane[0]] for lane in orders.compute if lane)

    def timed(lane: Lane) -> tuple[TimedOp, ...]:
        return tuple(TimedOp(op, start[op] - shift) for op in lane)

    lanes = zip(orders.compute, orders.offload, orders.reload)
    devices = [DevicePlan(timed(c), timed(o), timed(r)) for c, o, r in lanes]
    makespan = max(at + problem.duration_ms(op) for device in devices for op, at in device.compute)
    peaks = _peaks(problem, devices)
    return Plan(
        problem_sha256=problem.digest,
        method=method,
        makespan_ms=makespan,
        devices=tuple(
            DevicePlan(d.compute, d.offload, d.reload, peak) for d, peak in zip(devices, peaks)
        ),
    )


def retime(problem: Problem, plan: Plan, *, planned_for: Problem | None = None) -> Plan:
    """The earliest times of a plan's orders and waits under the durations of ``problem``.

    ``planned_for`` is the problem that the plan was made for (default: ``problem`` itself); it
    tells which releases the plan had before which allocations. Those stay before them, so rule 7
    holds under other durations wherever bytes and limits are unchanged; the caller checks all the
    same. The result carries the digest of ``problem``. Raises ``PlanError`` where the plan is not
    for ``planned_for`` or the shapes differ, ``Deadlock`` where the orders cannot run.
    """
    source = problem if planned_for is None else planned_for
    if plan.problem_sha256 != source.digest:
        raise PlanError(
            f"the plan is for problem {plan.problem_sha256[:12]}, not {source.digest[:12]}; "
            "give the problem it was made for"
        )
    if len(plan.devices) != problem.num_devices:
        raise PlanError(
            f"the plan has {len(plan.devices)} devices, the problem {problem.num_devices}; "
            "plan this problem anew"
        )
    orders = Orders.of(plan)
    needs: dict[Op, list[tuple[Op, float]]] = defaultdict(list)
    for lane in orders.lanes():
        for before, after in zip(lane, lane[1:]):
            needs[after].append((before, 0.0))
        for op in lane:
            if op.stage >= problem.num_stages or op.microbatch >= problem.num_microbatches:
                raise PlanError(f"{op}: the problem has no such op; plan this problem anew")
            if op.kind in COMPUTE:
                needs[op] += data_needs(problem, op)
    for op, others in cross_lane_waits(source, plan).items():
        needs[op] += [(other, 0.0) for other in others]
    start = _longest_paths(problem, [op for lane in orders.lanes() for op in lane], needs)
    return plan_from_starts(problem, orders, start, plan.method)


def _longest_paths(
    problem: Problem, ops: list[Op], needs: dict[Op, list[tuple[Op, float]]]
) -> dict[Op, float]:
    """Earliest start of every op of a graph of waits; raises ``Deadlock`` on a cycle."""
    missing = {op: len(needs[op]) for op in ops}
    followers: dict[Op, list[tuple[Op, float]]] = defaultdict(list)
    for op in ops:
        for need, hop in needs[op]:
            followers[need].append((op, hop))
    start = dict.fromkeys(ops, 0.0)
    ready = [op for op in ops if not missing[op]]
    done = 0
    while ready:
        op = ready.pop()
        done += 1
        end = start[op] + problem.duration_ms(op)
        for after, hop in followers[op]:
            start[after] = max(start[after], end + hop)
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if done < len(ops):
        waits: dict[Op, tuple[Op | None, str]] = {}
        for op in ops:
            if missing[op]:
                need = next(n for n, _ in needs[op] if n not in missing or missing[n])
                waits[op] = (need, f"needs {need}")
        raise Deadlock(describe_cycle(waits, {}))
    return start


def _peaks(problem: Problem, devices: list[DevicePlan]) -> list[int]:
    """Peak bytes of each device; releases before allocations of the same time (rule 7)."""
    peaks = []
    for device in devices:
        events: list[tuple[float, int]] = []
        for _, lane in device.lanes():
            for op, at in lane:
                taken, given = problem.memory_change(op)
                if taken:
                    events.append((at, taken))
                if given:
                    end = at + problem.duration_ms(op)
                    events.append((end - TIME_TOLERANCE_MS, given))
        peaks.append(_highest(events))
    return peaks


def _highest(events: list[tuple[float, int]]) -> int:
    held = peak = 0
    for _, change in sorted(events):
        held += change
        peak = max(peak, held)
    return peak


def summarize(problem: Problem, plan: Plan) -> Summary:
    """The figures of a plan that obeys the contract."""
    makespan = plan.makespan_ms
    busy, spans, moved = [], [], []
    host: list[tuple[float, int]] = []
    for device in plan.devices:
        busy.append(sum(problem.duration_ms(op) for op, _ in device.compute))
        ends = [at + problem.duration_ms(op) for op, at in device.compute]
        spans.append(max(ends) - min(at for _, at in device.compute))
        moved.append(sum(problem.stages[op.stage].wire_bytes for op, _ in device.offload))
        for op, at in device.offload:
            host.append((at, problem.stages[op.stage].wire_bytes))
        for op, at in device.reload:
            end = at + problem.duration_ms(op)
            host.append((end - TIME_TOLERANCE_MS, -problem.stages[op.stage].wire_bytes))
    bubbles = tuple(1.0 - b / makespan for b in busy)
    return Summary(
        makespan_ms=makespan,
        bubble=sum(bubbles) / len(bubbles),
        bubble_of=bubbles,
        own_span_ms=tuple(spans),
        busy_ms=tuple(busy),
        peak_bytes=tuple(_peaks(problem, list(plan.devices))),
        moved_bytes=tuple(moved),
        host_peak_bytes=_highest(host),
    )
