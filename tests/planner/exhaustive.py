"""An independent, exact search for the shortest makespan of a small problem.

It shares no code with the planner or with `core.timing`: it reads the numbers of a `Problem` and
nothing else, so a plan that matches it was checked by a second pair of eyes.

Ops are started one after another, in the order of their start times. The *natural* start of an op
is the earliest time that its predecessors, its resource and the memory pools allow, given what has
been started and the start of the last op that took from the same pools. Four rules keep the tree
small; each keeps at least one optimal plan (call the plans that obey 1-3 *tidy*; moving ops earlier
turns any optimal plan into a tidy one, and it ends, because the sum of the starts falls):

1. An op whose natural start has passed (a *missed* op) may not start now: it could have started
   earlier, and nobody would have minded. It waits until its natural start moves.
2. An op that takes no memory goes first if it could end before its resource's next start.
3. The transfers of one stage are in microbatch order (swapping two changes no event).
4. Of two partial plans with the same ops, the one that the future sees nowhere later, and that has
   missed no op that the other has not, is enough: any tidy completion of the other completes it.
   (Take the optimal tidy plan that is cut off last. Completing the better partial plan in the same
   way and tidying the completion gives an optimal tidy plan that is cut off even later.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_optpipe.core.problem import Problem

SLACK_MS = 1e-7
Name = tuple[str, int, int]
Pool = tuple[int, float, tuple[tuple[float, int], ...]]
"""What is left, since when, and what comes back later: (time, bytes), in time order."""


@dataclass
class _Op:
    name: Name
    duration: float
    resource: int
    takes: list[tuple[int, int]]  # (pool, bytes) when it starts
    gives: list[tuple[int, int]]  # (pool, bytes) when it ends
    after: list[tuple[int, float]] = field(default_factory=list)  # (op, hop)
    needs: int = 0  # mask of the ops that must have been started
    seen_until: int = 0  # mask: once all of these have started, nobody looks at this op's end
    tail: float = 0.0  # shortest time from its end to the end of the plan


class TooLarge(RuntimeError):
    """The search met more partial plans than it was allowed to."""


class Exhaustive:
    """Exact search below a given horizon; `states` counts the partial plans it looked at."""

    def __init__(self, problem: Problem, max_states: int = 1_000_000) -> None:
        self.problem = problem
        self.max_states = max_states
        self.states = 0
        self.ops: list[_Op] = []
        self.index: dict[Name, int] = {}
        self.resources: list[str] = []
        self.capacities: list[int] = [device.memory_bytes for device in problem.devices]
        if problem.host_memory_bytes is not None:
            self.capacities.append(problem.host_memory_bytes)
        for s in range(len(problem.stages)):
            self._add_stage(s)
        self._link_ops()
        self.required = sum(1 << i for name, i in self.index.items() if name[0] in "FBW")
        self.longest_hop = max((lag for op in self.ops for _, lag in op.after), default=0.0)

    def _add_stage(self, s: int) -> None:
        problem, stage, d = self.problem, self.problem.stages[s], self.problem.stage_device[s]
        device = problem.devices[d]
        act, frees = stage.activation_bytes, stage.backward_frees_bytes
        self._add("F", s, stage.forward_ms, f"device {d}", [(d, act)], [])
        self._add(
            "B",
            s,
            stage.backward_input_ms,
            f"device {d}",
            [(d, -frees)] if frees < 0 else [],
            [(d, frees)] if frees > 0 else [],
        )
        self._add("W", s, stage.backward_weight_ms, f"device {d}", [], [(d, act - frees)])
        if stage.offload_bytes > 0 and device.d2h is not None and device.h2d is not None:
            size, wire = stage.offload_bytes, stage.offload_wire_bytes
            wire = size if wire is None else wire
            out, back = problem.links[device.d2h], problem.links[device.h2d]
            host = [(len(problem.devices), wire)] if problem.host_memory_bytes is not None else []
            self._add(
                "O",
                s,
                out.latency_ms + wire / (out.gbps * 1e6),
                f"link {device.d2h}",
                host,
                [(d, size)],
            )
            self._add(
                "R",
                s,
                back.latency_ms + wire / (back.gbps * 1e6),
                f"link {device.h2d}",
                [(d, size)],
                host,
            )

    def _add(
        self,
        kind: str,
        s: int,
        duration: float,
        resource: str,
        takes: list[tuple[int, int]],
        gives: list[tuple[int, int]],
    ) -> None:
        if resource not in self.resources:
            self.resources.append(resource)
        for j in range(self.problem.num_microbatches):
            self.index[kind, s, j] = len(self.ops)
            self.ops.append(
                _Op(
                    (kind, s, j), duration, self.resources.index(resource), list(takes), list(gives)
                )
            )

    def _link_ops(self) -> None:
        stages, index = len(self.problem.stages), self.index
        before = {
            "F": [("F", -1)],
            "B": [("F", 0), ("B", 1)],
            "W": [("B", 0)],
            "O": [("F", 0)],
            "R": [("O", 0)],
        }
        until = {"F": "B", "B": "W", "O": "R", "R": "B"}
        for (kind, s, j), i in index.items():
            op = self.ops[i]
            for other, step in before[kind]:
                if 0 <= s + step < stages:
                    op.after.append((index[other, s + step, j], self._hop(s + step, s)))
            op.needs = sum(1 << a for a, _ in op.after)
            if kind in "FBW" and j > 0:
                op.needs |= 1 << index[kind, s, j - 1]
            lookers = [(kind, s, j + 1) if kind == "W" else (until[kind], s, j)]
            if kind == "B" and s > 0:
                lookers.append(("B", s - 1, j))
            op.seen_until = sum(1 << index[x] for x in lookers if x in index) or 1 << len(index)
        for _ in range(2 * stages + 2):  # long enough for the longest chain of stages
            for kind in "WBRFO":
                for s in range(stages):
                    for j in reversed(range(self.problem.num_microbatches)):
                        if (kind, s, j) in index:
                            self._raise_tails(index[kind, s, j])

    def _raise_tails(self, i: int) -> None:
        op = self.ops[i]
        kind, s, j = op.name
        behind = [] if kind == "O" else list(op.after)  # no F must be followed by an O
        if kind in "FBW" and j > 0:
            behind.append((self.index[kind, s, j - 1], 0.0))
        if kind == "B" and ("R", s, j) in self.index:
            behind.append((self.index["R", s, j], 0.0))
        for a, lag in behind:
            self.ops[a].tail = max(self.ops[a].tail, lag + op.duration + op.tail)

    def _hop(self, a: int, b: int) -> float:
        src, dst = self.problem.stage_device[a], self.problem.stage_device[b]
        hops = self.problem.p2p_ms
        if src == dst:
            return 0.0
        return float(hops) if isinstance(hops, (int, float)) else float(hops[src][dst])

    def run(self, horizon_ms: float = float("inf")) -> float | None:
        """The optimum, or None if no plan ends before `horizon_ms`. Raises TooLarge."""
        self.horizon = horizon_ms
        self.best: float | None = None
        self.starts: dict[Name, float] = {}
        self.ends = [0.0] * len(self.ops)
        self.seen: dict[int, list[tuple[int, list[float]]]] = {}
        work = [0.0] * len(self.resources)
        for op in self.ops:
            if op.name[0] in "FBW":
                work[op.resource] += op.duration
        pools: list[Pool] = [(size, 0.0, ()) for size in self.capacities]
        self._extend(0, 0.0, [0.0] * len(self.resources), pools, work)
        return self.best

    def _extend(
        self, started: int, now: float, free: list[float], pools: list[Pool], work: list[float]
    ) -> None:
        """Try every completion of one partial plan; `work` is what its resources still have."""
        if started & self.required == self.required:
            self._accept(started)
            return
        missed, candidates = 0, []
        for i, op in enumerate(self.ops):
            if not started >> i & 1 and started & op.needs == op.needs and self._open(i, started):
                natural = self._natural(i, free, pools)
                if natural is not None and natural < now - SLACK_MS:
                    missed |= 1 << i
                elif natural is not None:
                    candidates.append((max(natural, now), i))
        if not self._is_new(started, now, missed):
            return
        self.states += 1
        if self.states > self.max_states:
            raise TooLarge(f"more than {self.max_states} partial plans")
        first = [(float("inf"), -1)] * len(self.resources)
        for start, i in candidates:
            if self._takes_nothing(i, started):
                r = self.ops[i].resource
                first[r] = min(first[r], (start + self.ops[i].duration, i))
        candidates.sort(key=lambda item: (self.ops[item[1]].name[0] in "OR", item))
        for start, i in candidates:
            op = self.ops[i]
            end = start + op.duration
            first_end, harmless = first[op.resource]
            if (start >= first_end and i != harmless) or end + op.tail >= self.horizon - SLACK_MS:
                continue
            left = list(work)
            if op.name[0] == "O":  # what goes out comes back
                back = self.ops[self.index["R", op.name[1], op.name[2]]]
                left[back.resource] += back.duration
            else:
                left[op.resource] -= op.duration
            then_free = list(free)
            then_free[op.resource] = end
            if any(
                max(then_free[r], start) + todo >= self.horizon - SLACK_MS
                for r, todo in enumerate(left)
                if todo > 1e-9
            ):
                continue
            before, self.ends[i] = self.ends[i], end
            self._extend(started | 1 << i, start, then_free, _use(pools, op, start, end), left)
            self.ends[i] = before

    def _accept(self, started: int) -> None:
        latest = max(self.ends)  # every transfer ends before some B starts
        if latest < self.horizon - SLACK_MS:
            self.horizon = self.best = latest
            self.starts = {
                op.name: self.ends[i] - op.duration
                for i, op in enumerate(self.ops)
                if started >> i & 1
            }

    def _open(self, i: int, started: int) -> bool:
        """What `needs` cannot say: transfers are optional, come in pairs and keep their order."""
        kind, s, j = self.ops[i].name
        if ("O", s, j) not in self.index:
            return True
        gone = started >> self.index["O", s, j] & 1
        if kind == "O" and started >> self.index["B", s, j] & 1:
            return False
        if kind == "B":
            return not gone or bool(started >> self.index["R", s, j] & 1)
        if kind in "OR":
            for k in range(self.problem.num_microbatches):
                mine = started >> self.index[kind, s, k] & 1
                out = started >> self.index["O", s, k] & 1
                if (k > j and mine) or (kind == "R" and k < j and out and not mine):
                    return False
        return True

    def _natural(self, i: int, free: list[float], pools: list[Pool]) -> float | None:
        op = self.ops[i]
        kind, s, j = op.name
        start = max([free[op.resource], *(self.ends[a] + lag for a, lag in op.after)])
        if kind == "B" and ("R", s, j) in self.index:
            start = max(start, self.ends[self.index["R", s, j]])  # 0 where there is none
        for p, size in op.takes:
            if p >= len(pools):
                continue
            left, since, coming = pools[p]
            start = max(start, since)
            for time, back in coming:
                if left >= size:
                    break
                left, start = left + back, max(start, time)
            if left < size:
                return None
        return start

    def _takes_nothing(self, i: int, started: int) -> bool:
        kind, s, j = self.ops[i].name
        if kind == "B" and not self.ops[i].takes:  # a B ends the chance to offload
            return ("O", s, j) not in self.index or bool(started >> self.index["O", s, j] & 1)
        return kind == "W"

    def _is_new(self, started: int, now: float, missed: int) -> bool:
        floor = now - self.longest_hop
        view = [now]
        for i, op in enumerate(self.ops):
            if started >> i & 1 and started & op.seen_until != op.seen_until:
                view.append(max(self.ends[i], floor))
        known = self.seen.setdefault(started, [])
        for other_missed, other in known:
            if other_missed & ~missed == 0 and all(
                a <= b + 1e-9 for a, b in zip(other, view, strict=True)
            ):
                return False
        known.append((missed, view))
        return True


def _use(pools: list[Pool], op: _Op, start: float, end: float) -> list[Pool]:
    used = list(pools)
    for p, size in op.takes:
        left, _, coming = used[p]
        left += sum(back for time, back in coming if time <= start + 1e-9)
        used[p] = (left - size, start, tuple(x for x in coming if x[0] > start + 1e-9))
    for p, size in op.gives:
        if size:
            left, since, coming = used[p]
            used[p] = (left, since, tuple(sorted((*coming, (end, size)))))
    return used


def optimum_ms(problem: Problem, max_states: int = 1_000_000) -> float | None:
    """The shortest makespan of any plan, or None if no plan keeps the rules.

    Looks below a near horizon first and widens it: a search that must beat a near horizon is
    short, whether it succeeds or not. Raises TooLarge.
    """
    search = Exhaustive(problem, max_states)
    load = dict.fromkeys(range(len(search.resources)), 0.0)
    for op in search.ops:
        if op.name[0] in "FBW":
            load[op.resource] += op.duration
    horizon = max(*load.values(), *(op.duration + op.tail for op in search.ops))
    hops = sum(lag for op in search.ops for _, lag in op.after)
    everything = 2 * (sum(op.duration for op in search.ops) + hops) + 1.0
    step = horizon * 0.02
    while True:
        horizon += step
        step *= 1.5
        found = search.run(min(horizon, everything))
        if found is not None or horizon >= everything:
            return found
