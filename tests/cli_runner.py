"""Runs ``optpipe`` inside the test process and keeps what it wrote."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from megatron_optpipe.cli import main


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def optpipe(*arguments: object) -> Outcome:
    """Run one command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome: Outcome, code: int = 2) -> str:
    """Assert that the command ended with ``code`` and one line on stderr; return the line."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("optpipe: "), outcome
    assert outcome.err.endswith("\n"), outcome
    assert outcome.err.count("\n") == 1, outcome
    assert "Traceback" not in outcome.err + outcome.out
    assert "internal error" not in outcome.err, outcome
    return outcome.err
