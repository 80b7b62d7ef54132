"""What several commands take: files, quantities with units, names of methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from megatron_optpipe.units import UnitError, parse_seconds

METHODS = (
    "auto",
    "1f1b",
    "gpipe",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "greedy",
    "adaoffload",
    "search",
    "milp",
)
"""The planner's table by name, written out so that `--help` needs no scipy."""

STRATEGIES = ("aggressive", "conservative", "auto")
DEFAULT_TIME_LIMIT = "10"

Decorator = Callable[[Any], Any]


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """A time in seconds; a usage error where it cannot be read or is not above 0."""
    try:
        seconds = parse_seconds(value)
    except UnitError as failure:
        raise click.BadParameter(str(failure), ctx, param) from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r} must be greater than 0", ctx, param)
    return seconds


_FILE = click.Path(path_type=Path)


def problem_argument() -> Decorator:
    """PROBLEM, a problem file."""
    return click.argument("problem_file", metavar="PROBLEM", type=_FILE)


def plan_argument() -> Decorator:
    """PLAN, a plan file."""
    return click.argument("plan_file", metavar="PLAN", type=_FILE)


def time_limit_option(default: str, text: str) -> Decorator:
    """--time-limit, in seconds unless a unit is given."""
    return click.option(
        "--time-limit",
        "time_limit_s",
        callback=_seconds,
        metavar="S",
        default=default,
        show_default=True,
        help=text,
    )


def seed_option() -> Decorator:
    """--seed of the search."""
    return click.option(
        "--seed",
        type=click.IntRange(0, 2**31 - 1),
        default=0,
        show_default=True,
        help="Seed of the search; the same problem and seed give the same plan.",
    )
