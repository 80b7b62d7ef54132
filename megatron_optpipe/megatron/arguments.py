"""The flags: one argument group, ``--pipeline-schedule`` and ``--optpipe-*``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.units import UnitError, parse_bytes, parse_seconds

__all__ = [
    "PREFIX",
    "add_arguments",
    "has_ours",
    "is_on",
    "memory_limit_bytes",
    "planner_time_limit_s",
]

PREFIX = "optpipe_"


def has_ours(parser: ArgumentParser) -> bool:
    """Whether our argument group is in ``parser``."""
    return "--pipeline-schedule" in parser._option_string_actions


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our argument group to Megatron's parser (an ``extra_args_provider`` in its terms).

    A parser that has it is left as it is: a patched checkout adds it, and ``hook.install`` too.
    """
    if has_ours(parser):
        return parser
    group = parser.add_argument_group(title="optpipe")
    group.add_argument(
        "--pipeline-schedule",
        choices=("megatron", "optpipe"),
        default="megatron",
        help="who schedules the pipeline: Megatron's own 1F1B (default), or a plan",
    )
    group.add_argument(
        "--optpipe-plan",
        metavar="FILE",
        help="the plan to run; without it one is made at start-up",
    )
    group.add_argument(
        "--optpipe-problem",
        metavar="FILE",
        help="the measured problem of this job; default: the file beside the plan that fits it; "
        "without plan and problem a safe plan with the memory of 1F1B is made",
    )
    group.add_argument(
        "--optpipe-memory-limit",
        metavar="BYTES",
        help="what activations may use on each device, like 300MB or 40GiB; "
        "default: what the problem says",
    )
    group.add_argument(
        "--optpipe-method",
        default="auto",
        metavar="NAME",
        help="how a plan is made at start-up (the methods of `optpipe plan`); default auto",
    )
    group.add_argument(
        "--optpipe-planner-time-limit",
        default="10s",
        metavar="TIME",
        help="how long rank 0 may plan at start-up, like 10s or 2min; default 10s",
    )
    group.add_argument(
        "--optpipe-write-problem",
        metavar="FILE",
        help="measure F, B, W, bytes and links over the first iterations and write the problem",
    )
    group.add_argument(
        "--optpipe-profile-iterations",
        type=int,
        default=4,
        metavar="N",
        help="iterations that --optpipe-write-problem measures, after one to warm up; default 4",
    )
    group.add_argument(
        "--optpipe-log-dir",
        metavar="DIR",
        help="write plan.json, problem.json and each rank's measurement there",
    )
    group.add_argument(
        "--optpipe-fuse-adjacent-bw",
        action="store_true",
        help="run a B that its own W follows at once as one backward of Megatron's",
    )
    return parser


def is_on(args: Namespace) -> bool:
    """Whether this job asked for optpipe."""
    return getattr(args, "pipeline_schedule", "megatron") == "optpipe"


def memory_limit_bytes(args: Namespace) -> int | None:
    """``--optpipe-memory-limit`` in bytes. Raises ``OptPipeError``."""
    text = args.optpipe_memory_limit
    if text is None:
        return None
    try:
        limit = parse_bytes(text)
    except UnitError as failure:
        raise OptPipeError(f"--optpipe-memory-limit: {failure}") from None
    if limit < 1:
        raise OptPipeError(f"--optpipe-memory-limit {text}: must be above 0; raise it")
    return limit


def planner_time_limit_s(args: Namespace) -> float:
    """``--optpipe-planner-time-limit`` in seconds. Raises ``OptPipeError``."""
    try:
        return parse_seconds(args.optpipe_planner_time_limit)
    except UnitError as failure:
        raise OptPipeError(f"--optpipe-planner-time-limit: {failure}") from None
