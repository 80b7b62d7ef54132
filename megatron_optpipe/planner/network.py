"""The precedence network of a problem: ops, arrows between them, earliest and latest times.

Shared by the model of the MILP and by the bounds. An arc ``(a, b, lag)`` says: b starts at least
``lag`` ms after a ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_optpipe.core.op import COMPUTE, Op
from megatron_optpipe.core.problem import Problem

Arc = tuple[int, int, float]


class Cycle(ValueError):
    """The arcs go round in a circle: no times exist."""


@dataclass
class Network:
    """Ops with durations (ms) and arcs; rules 2 to 5 are arcs from the start."""

    problem: Problem
    ops: list[Op] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)
    index: dict[Op, int] = field(default_factory=dict)
    duration_ms: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=list)

    @classmethod
    def of_compute(cls, problem: Problem) -> Network:
        """Every F, B and W with the arcs of rules 2, 3, 4 and 5."""
        network = cls(problem)
        many = problem.num_microbatches
        for kind in COMPUTE:
            for s in range(problem.num_stages):
                for j in range(many):
                    network.add_op(Op(kind, s, j))
        at = network.index
        for s in range(problem.num_stages):
            for j in range(many):
                f, b, w = (at[Op(kind, s, j)] for kind in COMPUTE)
                network.arcs += [(f, b, 0.0), (b, w, 0.0)]
                if s + 1 < problem.num_stages:
                    here, there = problem.device_of(s), problem.device_of(s + 1)
                    network.arcs += [
                        (f, at[Op("F", s + 1, j)], problem.hop_ms(here, there)),
                        (at[Op("B", s + 1, j)], b, problem.hop_ms(there, here)),
                    ]
                if j + 1 < many:
                    network.arcs += [(at[Op(k, s, j)], at[Op(k, s, j + 1)], 0.0) for k in COMPUTE]
        return network

    def add_op(self, op: Op) -> int:
        """Add an op (once) and return its number."""
        if op not in self.index:
            self.index[op] = len(self.ops)
            self.ops.append(op)
            self.duration_ms.append(self.problem.duration_ms(op))
            self.device.append(self.problem.device_of(op.stage))
        return self.index[op]

    def topological(self, arcs: Sequence[Arc] | None = None) -> list[int]:
        """Op numbers, every op after what it waits for. Raises ``Cycle``."""
        arcs = self.arcs if arcs is None else arcs
        following: list[list[int]] = [[] for _ in self.ops]
        missing = [0] * len(self.ops)
        for a, b, _ in arcs:
            following[a].append(b)
            missing[b] += 1
        order = [i for i, count in enumerate(missing) if not count]
        for i in order:
            for b in following[i]:
                missing[b] -= 1
                if not missing[b]:
                    order.append(b)
        if len(order) < len(self.ops):
            raise Cycle("the arcs of the network have a cycle")
        return order

    def heads(self, extra: Iterable[Arc] = ()) -> list[float]:
        """Earliest start of every op by its arcs alone, ms."""
        arcs = [*self.arcs, *extra]
        into: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        for a, b, lag in arcs:
            into[b].append((a, lag))
        head = [0.0] * len(self.ops)
        for b in self.topological(arcs):
            for a, lag in into[b]:
                ready = head[a] + self.duration_ms[a] + lag
                if ready > head[b]:
                    head[b] = ready
        return head

    def tails(self, extra: Iterable[Arc] = ()) -> list[float]:
        """Least time from the end of every op to the end of the plan by its arcs alone, ms."""
        arcs = [*self.arcs, *extra]
        out: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        for a, b, lag in arcs:
            out[a].append((b, lag))
        tail = [0.0] * len(self.ops)
        for a in reversed(self.topological(arcs)):
            for b, lag in out[a]:
                after = lag + self.duration_ms[b] + tail[b]
                if after > tail[a]:
                    tail[a] = after
        return tail

    def ancestors(self, extra: Iterable[Arc] = ()) -> list[int]:
        """For every op, the bit mask of the ops that must end before it starts."""
        arcs = [*self.arcs, *extra]
        into: list[list[int]] = [[] for _ in self.ops]
        for a, b, _ in arcs:
            into[b].append(a)
        mask = [0] * len(self.ops)
        for b in self.topological(arcs):
            for a in into[b]:
                mask[b] |= mask[a] | 1 << a
        return mask

    def descendants(self, extra: Iterable[Arc] = ()) -> list[int]:
        """For every op, the bit mask of the ops that can only start after it has ended."""
        arcs = [*self.arcs, *extra]
        out: list[list[int]] = [[] for _ in self.ops]
        for a, b, _ in arcs:
            out[a].append(b)
        mask = [0] * len(self.ops)
        for a in reversed(self.topological(arcs)):
            for b in out[a]:
                mask[a] |= mask[b] | 1 << b
        return mask
