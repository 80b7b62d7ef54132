"""Where Megatron meets optpipe: three functions that a patched checkout calls, and ``install``.

A patched checkout calls ``add_arguments``, ``validate`` and ``forward_backward_func``; with the
flag off the last one returns what it was given. ``install`` gets the same without touching a
file: it replaces names in Megatron's modules, once the flag is known to be on, and nothing before.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.megatron import arguments as flags
from megatron_optpipe.megatron.arguments import PREFIX, is_on

__all__ = ["add_arguments", "forward_backward_func", "install", "refuse", "validate"]

GETTER = "get_forward_backward_func"

RANK_0_FIRST_S = 10.0
"""How long the other ranks of a refused job give rank 0 to say why."""

_run: Any = None
"""The one ``PipelineRun`` of this process (training and evaluation share plan and transport)."""


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our argument group to Megatron's parser; one that has it is left as it is."""
    if not flags.has_ours(parser):
        flags.add_arguments(parser)
        _look_when_parsed(parser, _refuse_yaml)
    return parser


def validate(args: Namespace) -> None:
    """Check, after Megatron's own validation, that this job can run under a plan.

    A job that cannot is refused in one line, on every rank, before anything is built. With the
    flag off nothing is read; flags that will then be ignored are named.
    """
    if not is_on(args):
        _warn_of_ignored(args)
        return
    from megatron_optpipe.megatron.compat import first_conflict
    from megatron_optpipe.megatron.job import load_job

    try:
        conflict = first_conflict(args)
        if conflict is not None:
            raise OptPipeError(conflict.message())
        load_job(args)
    except OptPipeError as failure:
        refuse(failure, args.rank)


def forward_backward_func(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's forward-backward function, or ours where the flag is on.

    Args:
        stock: what ``get_forward_backward_func`` chose; returned as it is with the flag off.
    """
    # In a patched checkout a program of megatron.core alone passes here too: it has no arguments.
    if "megatron.training" not in sys.modules:
        return stock
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:
        return stock
    if not is_on(args):
        return stock
    global _run
    if _run is None:
        from megatron_optpipe.megatron.schedule import PipelineRun

        try:
            _run = PipelineRun.start(args)
        except OptPipeError as failure:
            refuse(failure, args.rank)
    return _run


def install() -> None:
    """Make an unmodified Megatron know our flags; call it before the script parses its arguments.

    Only the function that builds the parser is replaced, and it is put back as soon as the
    arguments are parsed. Where they say ``optpipe`` the other names are replaced then.
    """
    from megatron.training import arguments

    stock = arguments.add_megatron_arguments
    if hasattr(stock, "optpipe_stock"):
        return

    @functools.wraps(stock)
    def with_ours(parser: ArgumentParser) -> ArgumentParser:
        arguments.add_megatron_arguments = stock
        parser = add_arguments(stock(parser))
        _look_when_parsed(parser, _replace_if_on)
        return parser

    with_ours.optpipe_stock = stock  # type: ignore[attr-defined]
    arguments.add_megatron_arguments = with_ours


def refuse(failure: OptPipeError, rank: int) -> NoReturn:
    """End this rank without a traceback; rank 0 says why, in one line.

    The launcher ends all ranks as soon as one has ended, so that one has to be rank 0.
    """
    if rank == 0:
        print(f"optpipe: {failure}", file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_FIRST_S)
    sys.exit(2)


def _look_when_parsed(parser: ArgumentParser, look: Callable[[Namespace], None]) -> None:
    known = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:  # parse_args calls it as well
        namespace, rest = known(*args, **kwargs)
        look(namespace)
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _replace_if_on(args: Namespace) -> None:
    if is_on(args):
        _replace()
    else:
        _warn_of_ignored(args)


def _refuse_yaml(args: Namespace) -> None:
    """Megatron would now forget the command line, our flag included, and train without us."""
    if not is_on(args) or getattr(args, "yaml_cfg", None) is None:
        return
    from megatron_optpipe.megatron.compat import CONFLICTS

    row = next(row for row in CONFLICTS if row.name == "--yaml-cfg")
    refuse(OptPipeError(row.message()), int(os.environ.get("RANK", "0")))


def _replace() -> None:
    """Put ours in the place of two functions of Megatron, wherever they are bound by name."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import arguments

    stock_validate = arguments.validate_args
    if hasattr(stock_validate, "optpipe_stock"):
        return

    @functools.wraps(stock_validate)
    def validate_args(args: Namespace, *rest: Any, **named: Any) -> Any:
        result = stock_validate(args, *rest, **named)
        validate(args)
        return result

    stock_getter = schedules.get_forward_backward_func

    @functools.wraps(stock_getter)
    def getter(*positional: Any, **named: Any) -> Callable[..., Any]:
        return forward_backward_func(stock_getter(*positional, **named))

    places = []
    replaced: list[tuple[str, Any, Any]] = [
        ("validate_args", stock_validate, validate_args),
        (GETTER, stock_getter, getter),
    ]
    for name, stock, ours in replaced:
        ours.optpipe_stock = stock
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] in _OWNERS]:
            if getattr(module, name, None) is stock:
                setattr(module, name, ours)
                places.append(f"{module.__name__}.{name}")
    _say(f"optpipe: replaced {', '.join(sorted(places))}")


_OWNERS = ("megatron", "__main__")
"""Top-level names of modules in which Megatron's functions may be bound."""


def _warn_of_ignored(args: Namespace) -> None:
    given = [
        name
        for name, value in vars(args).items()
        if name.startswith(PREFIX) and value and value != _defaults().get(name)
    ]
    if given:
        given_flags = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
        _say(f"optpipe: {given_flags} ignored without --pipeline-schedule optpipe")


@functools.cache
def _defaults() -> dict[str, Any]:
    return vars(flags.add_arguments(ArgumentParser(allow_abbrev=False)).parse_args([]))


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
