"""One error class for each audience; every message is one line: value, rule, remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_optpipe.core.check import Violation


class OptPipeError(ValueError):
    """A mistake that the user can put right; shown as one line, never as a traceback."""


class ProblemError(OptPipeError):
    """A problem file, or a problem built in code, breaks the contract."""


class PlanError(OptPipeError):
    """A plan file breaks the contract, or is for another problem."""


class PlanInvalid(PlanError):
    """A well-formed plan breaks a rule of the contract; ``violations`` says which."""

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class Deadlock(OptPipeError):
    """An order of ops in which nobody can move; the message says who waits for whom."""
