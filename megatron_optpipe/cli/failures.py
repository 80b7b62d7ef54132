"""From an exception to one line for the user and an exit code."""

from __future__ import annotations

import errno
from typing import NamedTuple

import click

from megatron_optpipe.core.errors import Deadlock, OptPipeError, PlanInvalid
from megatron_optpipe.units import UnitError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 3
EXIT_INTERRUPTED = 130


class CheckFailed(Exception):
    """The input was read and understood, and what was asked about it does not hold: exit 1."""


class BadInput(Exception):
    """What was typed or a file named on the command line is no good: exit 2."""


class UserError(NamedTuple):
    """What to tell and how to end."""

    message: str
    exit_code: int


def user_error(error: Exception) -> UserError | None:
    """The line and exit code for an error a user can cause; None for a fault of ours."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "optpipe"
        return UserError(f"{error.format_message()} (see `{where} --help`)", EXIT_BAD_INPUT)
    if isinstance(error, click.ClickException):
        return UserError(error.format_message(), EXIT_BAD_INPUT)
    # The runtime's faults are matched by name: naming their classes would import torch.
    of_runtime = type(error).__name__ in ("RuntimeFault", "RehearsalFailed")
    if of_runtime or isinstance(error, (CheckFailed, PlanInvalid, Deadlock)):
        return UserError(str(error), EXIT_FAILED)
    if isinstance(error, (BadInput, OptPipeError, UnitError)):
        return UserError(str(error), EXIT_BAD_INPUT)
    if isinstance(error, OSError):
        return UserError(_of_os(error), EXIT_BAD_INPUT)
    if isinstance(error, ModuleNotFoundError):
        return _of_missing_module(error)
    if isinstance(error, MemoryError):
        return UserError("out of memory: the problem is too large for this machine", EXIT_FAILED)
    return None


_REMEDIES = {
    errno.ENOENT: "correct the name",
    errno.EACCES: "change its permissions or choose another place",
    errno.EEXIST: "it is no directory; name another place",
    errno.EISDIR: "it is a directory; name a file",
    errno.ENOTDIR: "a part of that name is no directory; correct it",
    errno.ENOSPC: "make room or choose another place",
    errno.EROFS: "choose another place",
}


def _of_os(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in _REMEDIES:
        reason = f"{reason}; {_REMEDIES[error.errno]}"
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def _of_missing_module(error: ModuleNotFoundError) -> UserError | None:
    extra = {"torch": "megatron", "megatron": "megatron", "matplotlib": "view", "PIL": "view"}
    module = (error.name or "").split(".")[0]
    if module not in extra:
        return None
    return UserError(
        f"this needs the package {module}, which is not installed;"
        f" install it with: pip install 'megatron-optpipe[{extra[module]}]'",
        EXIT_BAD_INPUT,
    )
