"""A mixed-integer linear program in the making: columns, rows, and arcs that hold on conditions.

Times inside the model are scaled so that the horizon is 1,000: HiGHS loses digits, and with them
big-M disjunctions, when numbers are large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
HORIZON_UNITS = 1000.0


class Literal(NamedTuple):
    """A 0/1 value of the model: ``const + factor * column``; ``column`` is -1 for a constant."""

    const: int
    factor: int = 0
    column: int = -1

    def negated(self) -> Literal:
        """1 minus this."""
        return Literal(1 - self.const, -self.factor, self.column)

    @property
    def is_true(self) -> bool:
        """Whether it is the constant 1."""
        return not self.factor and self.const == 1

    @property
    def is_false(self) -> bool:
        """Whether it is the constant 0."""
        return not self.factor and self.const == 0


TRUE, FALSE = Literal(1), Literal(0)


class ConditionalArc(NamedTuple):
    """Where all literals are 1, op ``b`` starts at least ``lag_ms`` after op ``a`` ends (or, with
    ``from_end`` false, starts). Op numbers are the columns of their end times.
    """

    a: int
    b: int
    literals: tuple[Literal, ...] = ()
    lag_ms: float = 0.0
    from_end: bool = True


class Arrays(NamedTuple):
    """The program as ``scipy.optimize.milp`` takes it; the matrix in coordinate form."""

    objective: Floats
    lower: Floats
    upper: Floats
    integrality: npt.NDArray[np.int8]
    row: npt.NDArray[np.int64]
    col: npt.NDArray[np.int64]
    value: Floats
    row_lower: Floats
    row_upper: Floats


@dataclass
class Model:
    """Grows column by column and row by row; ``arrays`` is what a solver gets."""

    scale: float
    """Units a millisecond."""
    length: list[float] = field(default_factory=list)
    """Duration of every op, in units."""
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    arcs: list[ConditionalArc] = field(default_factory=list)
    _rows: list[tuple[list[tuple[int, float]], float, float]] = field(default_factory=list)
    impossible: bool = False
    """Whether building met a contradiction: nothing lies below the horizon."""

    def column(self, lower: float, upper: float, *, integer: bool = False) -> int:
        """Add a variable and return its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(1 if integer else 0)
        return len(self.lower) - 1

    def binary(self) -> Literal:
        """Add a 0/1 variable."""
        return Literal(0, 1, self.column(0.0, 1.0, integer=True))

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """``lower <= sum(factor * column) <= upper``."""
        self._rows.append((terms, lower, upper))

    def at_most(self, weighted: list[tuple[Literal, float]], limit: float) -> None:
        """The weighted sum of literals is at most ``limit``."""
        terms: dict[int, float] = {}
        for literal, weight in weighted:
            limit -= literal.const * weight
            if literal.factor:
                terms[literal.column] = terms.get(literal.column, 0.0) + literal.factor * weight
        kept = [(column, factor) for column, factor in terms.items() if factor]
        if sum(max(0.0, factor) for _, factor in kept) <= limit + 1e-9:
            return  # cannot be broken
        if sum(min(0.0, factor) for _, factor in kept) > limit + 1e-9:
            self.impossible = True
        self.row(kept, -math.inf, limit)

    def implies(self, a: Literal, b: Literal) -> None:
        """Where a is 1, b is 1."""
        self.at_most([(a, 1.0), (b, -1.0)], 0.0)

    def arc(self, arc: ConditionalArc) -> None:
        """Add an arc between end-time columns: E_b - T_b >= E_a + lag (E_a - T_a for starts).

        Big-M is the least that the bounds of the two end times allow; arcs that the bounds imply
        are recorded for re-timing but need no row.
        """
        if any(literal.is_false for literal in arc.literals):
            return
        self.arcs.append(arc)
        gap = arc.lag_ms * self.scale + self.length[arc.b]
        if not arc.from_end:
            gap -= self.length[arc.a]
        big = self.upper[arc.a] + gap - self.lower[arc.b]
        if big <= 1e-9:
            return
        terms = [(arc.b, 1.0), (arc.a, -1.0)]
        limit = gap
        for literal in arc.literals:
            if literal.factor:
                # E_b - E_a >= gap - big * (1 - literal)
                terms.append((literal.column, -big * literal.factor))
                limit -= big * (1 - literal.const)
        self.row(terms, limit, math.inf)

    def arrays(self, objective_column: int) -> Arrays:
        """The finished program: minimise one column."""
        objective = np.zeros(len(self.lower))
        objective[objective_column] = 1.0
        row = [r for r, (terms, _, _) in enumerate(self._rows) for _ in terms]
        col = [column for terms, _, _ in self._rows for column, _ in terms]
        value = [factor for terms, _, _ in self._rows for _, factor in terms]
        return Arrays(
            objective,
            np.array(self.lower),
            np.array(self.upper),
            np.array(self.integer, dtype=np.int8),
            np.array(row, dtype=np.int64),
            np.array(col, dtype=np.int64),
            np.array(value, dtype=np.float64),
            np.array([lower for _, lower, _ in self._rows]),
            np.array([upper for _, _, upper in self._rows]),
        )

    @property
    def num_rows(self) -> int:
        """How many rows the program has."""
        return len(self._rows)

    @property
    def num_binaries(self) -> int:
        """How many 0/1 variables the program has."""
        return sum(self.integer)


def value_of(literal: Literal, x: Floats) -> bool:
    """Whether a literal is 1 in a solution."""
    if not literal.factor:
        return literal.const == 1
    return bool(literal.const + literal.factor * x[literal.column] > 0.5)
