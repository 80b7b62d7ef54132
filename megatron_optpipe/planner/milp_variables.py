"""The variables of the MILP: end times, offload choices, and orders that are still open.

Read beside docs/milp.md. Everything that rules, windows or the kept part of the incumbent decide
already is a constant; only what is open becomes a column.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_optpipe.core.op import COMPUTE, TIME_TOLERANCE_MS, Op
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.planner.milp_model import (
    FALSE,
    HORIZON_UNITS,
    TRUE,
    ConditionalArc,
    Literal,
    Model,
)
from megatron_optpipe.planner.milp_windows import tight_windows
from megatron_optpipe.planner.network import Arc, Network


@dataclass(frozen=True, slots=True)
class Reductions:
    """What makes the model smaller or tighter; none of them changes an optimum."""

    symmetry: bool = True
    """Transfers of one stage and direction in microbatch order."""
    windows: bool = True
    """Orders forced by time windows below the incumbent's makespan are fixed."""
    memory_arcs: bool = True
    """Releases that must precede an allocation whatever the plan are ordered before it."""
    triangle_cuts: bool = True
    cover_cuts: bool = True


class Variables:
    """Columns and literals of one model. Op numbers of the network are columns (end times)."""

    def __init__(
        self,
        problem: Problem,
        horizon_ms: float,
        reductions: Reductions,
        incumbent: Plan | None = None,
        free: Collection[Op] | None = None,
    ) -> None:
        """``free``: the ops to be re-decided; all others keep the order of the incumbent. With a
        free O(s,j) it is also open whether (s,j) is offloaded at all, and when it returns.

        Raises ``NothingBelow`` where no plan can end by the horizon.
        """
        self.problem = problem
        self.reductions = reductions
        self.scale = HORIZON_UNITS / horizon_ms
        self.kept_start = incumbent.starts() if incumbent is not None and free is not None else {}
        self.open_offloads = {op for op in free or () if op.kind == "O"}
        self.network = Network.of_compute(problem)
        self.free = self._free_numbers(free)
        fixed = self._kept_order() if self.kept_start else []
        windows = tight_windows(
            self.network,
            fixed,
            horizon_ms,
            fix=reductions.windows,
            memory=reductions.memory_arcs,
            free=self.free if self.kept_start else None,
        )
        self.arcs: list[Arc] = [*self.network.arcs, *fixed, *windows.forced]
        self.ancestors = windows.ancestors
        self.earliest = [start * self.scale for start in windows.earliest_ms]
        self.latest = [start * self.scale for start in windows.latest_ms]
        self.length = [duration * self.scale for duration in self.network.duration_ms]
        self.model = Model(self.scale, self.length)
        for early, late, length in zip(self.earliest, self.latest, self.length):
            self.model.column(early + length, late + length)
        self.away: dict[tuple[int, int], Literal] = {}
        self._transfers()
        self.makespan = self.model.column(0.0, HORIZON_UNITS)
        self._orders: dict[tuple[int, int], Literal] = {}
        self._events: dict[tuple[int, int, str], Literal] = {}

    def _free_numbers(self, free: Collection[Op] | None) -> set[int]:
        if free is None or not self.kept_start:
            return set(range(len(self.network.ops)))
        return {self.network.index[op] for op in free if op.kind in COMPUTE}

    def _kept_order(self) -> list[Arc]:
        """Arcs between neighbours among the ops of each device that are not free."""
        arcs: list[Arc] = []
        for d in range(self.problem.num_devices):
            kept = [
                i
                for i, op in enumerate(self.network.ops)
                if self.network.device[i] == d and i not in self.free
            ]
            kept.sort(
                key=lambda i: (
                    self.kept_start[self.network.ops[i]],
                    self.kept_start[self.network.ops[i]] + self.network.duration_ms[i],
                )
            )
            arcs += [(a, b, 0.0) for a, b in zip(kept, kept[1:])]
        return arcs

    def _transfers(self) -> None:
        """O and R of every activation that may leave, where they fit between its F and B.

        Without kept ops every activation that may leave has a choice; else only those of which
        O is free, and the rest do what the incumbent does.
        """
        for s in range(self.problem.num_stages):
            if not self.problem.can_offload(s):
                continue
            for j in range(self.problem.num_microbatches):
                self._transfer(s, j)

    def _transfer(self, s: int, j: int) -> None:
        at = self.network.index
        out, back = Op("O", s, j), Op("R", s, j)
        f, b = at[Op("F", s, j)], at[Op("B", s, j)]
        is_free = not self.kept_start or out in self.open_offloads
        if not is_free and out not in self.kept_start:
            return
        out_length = self.problem.duration_ms(out) * self.scale
        back_length = self.problem.duration_ms(back) * self.scale
        early = self.earliest[f] + self.length[f]
        late = self.latest[b] - back_length
        if early + out_length > late + 1e-6:
            return
        choice = self.model  # columns of O and R follow their op numbers
        for op, first, last, length in (
            (out, early, late - out_length, out_length),
            (back, early + out_length, late, back_length),
        ):
            i = self.network.add_op(op)
            self.earliest.append(first)
            self.latest.append(last)
            self.length.append(length)
            self.ancestors.append(0)
            if choice.column(first + length, last + length) != i:
                raise AssertionError("columns and op numbers have come apart")
            if is_free:
                self.free.add(i)
        self.away[s, j] = TRUE  # replaced by a choice once all end times have their columns
        if is_free:
            self.away[s, j] = Literal(0, 1, -2)

    def choose_offloads(self) -> None:
        """Give every open offload choice x(s, j) its column; call once, after construction."""
        for key, literal in self.away.items():
            if literal.column == -2:
                self.away[key] = self.model.binary()

    def kept_arcs(self) -> list[ConditionalArc]:
        """What the kept transfers keep: their order on links, and on their device which releases
        they had before which allocations. Neighbours are enough, kept lanes imply the rest.
        """
        arcs: list[ConditionalArc] = []
        ops, near = self.network.ops, TIME_TOLERANCE_MS
        kept = sorted(
            (i for i in range(len(ops)) if self.is_kept(i)),
            key=lambda i: self.kept_ms(i, end=False),
        )
        moves = [i for i in kept if ops[i].kind not in COMPUTE]
        links: dict[str, list[int]] = {}
        for i in moves:
            links.setdefault(self.problem.link_name(ops[i]), []).append(i)
        for users in links.values():
            arcs += [ConditionalArc(a, b) for a, b in zip(users, users[1:])]
        for i in moves:
            own = [a for a in kept if self.network.device[a] == self.network.device[i]]
            compute = [a for a in own if ops[a].kind in COMPUTE]
            takers = [a for a in compute if self.problem.memory_change(ops[a]).at_start_bytes]
            begin, end = self.kept_ms(i, end=False), self.kept_ms(i, end=True)
            if ops[i].kind == "O":
                later = [a for a in takers if self.kept_ms(a, end=False) >= end - near]
                arcs += [ConditionalArc(i, a) for a in later[:1]]
                continue
            later = [a for a in takers if self.kept_ms(a, end=False) >= begin - near]
            arcs += [ConditionalArc(i, a, from_end=False) for a in later[:1]]
            sooner = [a for a in takers if self.kept_ms(a, end=False) < begin - near]
            arcs += [ConditionalArc(a, i, from_end=False) for a in sooner[-1:]]
            for lane in (compute, [a for a in own if ops[a].kind == "O"]):
                ended = [a for a in lane if self.kept_ms(a, end=True) <= begin + near]
                arcs += [ConditionalArc(a, i) for a in ended[-1:]]
        return arcs

    def is_away(self, i: int) -> Literal:
        """x of a transfer; 1 for a compute op."""
        op = self.network.ops[i]
        return TRUE if op.kind in COMPUTE else self.away[op.stage, op.microbatch]

    def is_kept(self, i: int) -> bool:
        """Whether op ``i`` keeps its place relative to all other kept ops."""
        return bool(self.kept_start) and i not in self.free

    def kept_ms(self, i: int, *, end: bool) -> float:
        """Start or end of a kept op in the incumbent."""
        return self.kept_start[self.network.ops[i]] + (self.network.duration_ms[i] if end else 0.0)

    def order(self, a: int, b: int) -> Literal:
        """P: whether op a comes before op b, both of one device or both of one link."""
        if (b, a) in self._orders:
            return self._orders[b, a].negated()
        if (a, b) not in self._orders:
            self._orders[a, b] = self._new_order(a, b)
        return self._orders[a, b]

    def _new_order(self, a: int, b: int) -> Literal:
        literal = self.known_order(a, b)
        if literal is None:
            literal = self.model.binary()
        elif (
            self.ancestors[b] >> a & 1
            or self.ancestors[a] >> b & 1
            or (self.is_kept(a) and self.is_kept(b))
        ):
            return literal  # arcs say so already
        both = (self.is_away(a), self.is_away(b))
        self.model.arc(self.link(a, b, (literal, *both)))
        self.model.arc(self.link(b, a, (literal.negated(), *both)))
        return literal

    def known_order(self, a: int, b: int) -> Literal | None:
        """TRUE or FALSE where it is decided that a comes before b; None: open."""
        if self.ancestors[b] >> a & 1:
            return TRUE
        if self.ancestors[a] >> b & 1:
            return FALSE
        one, two = self.network.ops[a], self.network.ops[b]
        if self.is_kept(a) and self.is_kept(b):
            return TRUE if self.kept_ms(a, end=False) < self.kept_ms(b, end=False) else FALSE
        if (
            one.kind == two.kind
            and one.stage == two.stage
            and (one.kind in COMPUTE or self.reductions.symmetry)
        ):
            return TRUE if one.microbatch < two.microbatch else FALSE
        if one[1:] == two[1:] and {one.kind, two.kind} == {"O", "R"}:
            return TRUE if one.kind == "O" else FALSE
        if self._cannot_precede(a, b):
            return FALSE
        return TRUE if self._cannot_precede(b, a) else None

    def _cannot_precede(self, a: int, b: int) -> bool:
        one, two = self.network.ops[a], self.network.ops[b]
        if (
            self.reductions.symmetry
            and (two.kind, one.kind) == ("O", "R")
            and one.stage == two.stage
            and two.microbatch <= one.microbatch
        ):
            return True  # transfers in microbatch order: O(s,j) before O(s,k) before R(s,k)
        return self.reductions.windows and (
            self.earliest[a] + self.length[a] > self.latest[b] + 1e-6
        )

    def link(
        self, a: int, b: int, literals: tuple[Literal, ...], lag_ms: float = 0.0
    ) -> ConditionalArc:
        """Where all literals are 1, op b starts at least ``lag_ms`` after op a ends."""
        return ConditionalArc(a, b, literals, lag_ms)

    def ended_before(self, r: int, a: int) -> Literal:
        """Whether the end of op r is known to come by the start of op a (releases)."""
        one, two = self.network.ops[r], self.network.ops[a]
        if one.kind in COMPUTE and two.kind in COMPUTE:
            return self.order(r, a)
        if (r, a, "end") not in self._events:
            self._events[r, a, "end"] = self._new_release(r, a)
        return self._events[r, a, "end"]

    def _new_release(self, r: int, a: int) -> Literal:
        fixed = self.known_event(r, a, end=True)
        if fixed is not None:
            if fixed.is_true and one_of_host(self, r, a):
                self.model.arc(self.link(r, a, ()))
            return fixed
        literal = self.model.binary()
        self.model.arc(self.link(r, a, (literal,)))
        if self.network.ops[r].kind in "OR":
            self.model.implies(literal, self.is_away(r))
        return literal

    def started_by(self, i: int, a: int) -> Literal:
        """Whether transfer ``i`` has started when op ``a`` starts (allocations)."""
        if (i, a, "start") not in self._events:
            self._events[i, a, "start"] = self._new_start(i, a)
        return self._events[i, a, "start"]

    def _new_start(self, i: int, a: int) -> Literal:
        fixed = self.known_event(i, a, end=False)
        if fixed is not None:
            if one_of_host(self, i, a):
                first, second = (i, a) if fixed.is_true else (a, i)
                self.model.arc(ConditionalArc(first, second, from_end=False))
            return fixed
        literal = self.model.binary()
        here, there = self.is_away(i), self.is_away(a)
        self.model.implies(literal, here)
        self.model.arc(ConditionalArc(i, a, (literal, there), from_end=False))
        self.model.arc(ConditionalArc(a, i, (literal.negated(), here, there), from_end=False))
        return literal

    def known_event(self, i: int, a: int, *, end: bool) -> Literal | None:
        """Whether op i has ended (or started) by the start of op a, where that is decided.

        By rules, the incumbent or windows; None: open.
        """
        op, other = self.network.ops[i], self.network.ops[a]
        at = self.network.index
        if op.kind in "OR" and other.kind in COMPUTE:
            f, b = at[Op("F", *op[1:])], at[Op("B", *op[1:])]
            if a == f or self.ancestors[f] >> a & 1:
                return FALSE
            if a == b or self.ancestors[a] >> b & 1:
                return self.is_away(i)
        if op.kind in COMPUTE and other.kind == "R":
            f, b = at[Op("F", *other[1:])], at[Op("B", *other[1:])]
            if i == f or self.ancestors[f] >> i & 1:
                return TRUE
            if i == b or self.ancestors[i] >> b & 1:
                return FALSE
        if self.is_kept(i) and self.is_kept(a):
            here, there = self.kept_ms(i, end=end), self.kept_ms(a, end=False)
            return TRUE if here <= there + TIME_TOLERANCE_MS else FALSE
        if self.reductions.windows:
            offset = self.length[i] if end else 0.0
            if self.latest[i] + offset <= self.earliest[a] + 1e-9:
                return self.is_away(i)
            if self.earliest[i] + offset > self.latest[a] + 1e-6:
                return FALSE
        return None


def one_of_host(v: Variables, i: int, a: int) -> bool:
    """Whether two kept ops form a pair that only the host's memory asks about."""
    kinds = {v.network.ops[i].kind, v.network.ops[a].kind}
    return v.is_kept(i) and v.is_kept(a) and v.network.ops[a].kind == "O" and kinds <= {"O", "R"}
