"""The group of commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

import click

from megatron_optpipe import __version__
from megatron_optpipe.cli import check, compare, patch, plan, rehearse, show, unsupported
from megatron_optpipe.cli.failures import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    user_error,
)
from megatron_optpipe.view.text import one_line

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    click.echo(f"optpipe {__version__}")
    ctx.exit()


@click.group(context_settings=CONTEXT)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and end.",
)
@click.option(
    "--traceback", is_flag=True, help="Show the Python traceback of an error, for a bug report."
)
@click.pass_context
def optpipe(ctx: click.Context, traceback: bool) -> None:
    """Plan, check, compare, rehearse and look at pipeline iterations.

    A problem file says what an iteration consists of and what memory and links there are; a
    plan file says when each op runs. Exit codes: 0 fine, 1 a check failed, 2 bad input.
    """
    if ctx.obj is not None:
        ctx.obj["traceback"] = traceback


for _command in (
    plan.plan,
    check.check,
    compare.compare,
    rehearse.rehearse,
    show.show,
    patch.patch,
    unsupported.unsupported,
):
    optpipe.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code.

    A user's error is one line on stderr, never a traceback.
    """
    wanted = {"traceback": False}
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning  # type: ignore[assignment]
            result = optpipe.main(
                args=given, prog_name="optpipe", standalone_mode=False, obj=wanted
            )
        _flush_output()
        # Without its standalone mode click returns the code of ctx.exit().
        return result if isinstance(result, int) else EXIT_OK
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone: not an error. Python would complain at exit while
        # flushing, so nothing may be left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if wanted["traceback"]:
            raise
        known = user_error(error)
        if known is not None:
            _complain(known.message)
            return known.exit_code
        _complain(
            f"internal error, please report it: {type(error).__name__}: {error}"
            " (run `optpipe --traceback ...` for the details)"
        )
        return EXIT_INTERNAL


def _say_warning(message: Warning | str, *_: object) -> None:
    """A warning as a user reads it: one line, no source line of ours."""
    _complain(f"warning: {message}")


def _flush_output() -> None:
    if sys.stdout is not None:  # None where the caller closed it (>&-)
        sys.stdout.flush()


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the line below says so
        _flush_output()
    if sys.stderr is None:
        return
    line = f"optpipe: {one_line(message)}\n"
    encoding = sys.stderr.encoding or "ascii"
    sys.stderr.write(line.encode(encoding, "backslashreplace").decode(encoding))
    sys.stderr.flush()
