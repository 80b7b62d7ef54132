"""``optpipe plan PROBLEM -o PLAN``: make a plan and say how good it is."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_optpipe.cli.arguments import (
    DEFAULT_TIME_LIMIT,
    METHODS,
    STRATEGIES,
    problem_argument,
    seed_option,
    time_limit_option,
)
from megatron_optpipe.cli.files import read_plannable, require_writable

UNCOMPILED = (
    "note: the search ran as plain Python, some fifty times slower than compiled: "
    "pip install 'megatron-optpipe[fast]', then once: python -m "
    "megatron_optpipe.planner.warm"
)


@click.command(short_help="Make a plan for a problem.")
@problem_argument()
@click.option(
    "-o",
    "--output",
    "plan_file",
    metavar="PLAN",
    type=click.Path(path_type=Path),
    required=True,
    help="The plan file to write; an existing one is replaced.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="How to plan. auto: the best of the classic orders and AdaOffload, then improved by"
    " search and MILP until the time limit.",
)
@time_limit_option(DEFAULT_TIME_LIMIT, "Planning time (20, 500ms, 2min).")
@seed_option()
@click.option(
    "--mipgap",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=0.0,
    show_default=True,
    help="Stop when the plan is proven to be within this part of the best (0.01: 1 %).",
)
@click.option(
    "--max-microbatches",
    type=click.IntRange(min=1),
    default=None,
    help="Look for the shape of a plan on at most so many microbatches.",
)
@click.option(
    "--offload-strategy",
    type=click.Choice(STRATEGIES),
    default="auto",
    show_default=True,
    help="How readily activations are offloaded.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Keep plans here and reuse them for the same and for similar problems.",
)
def plan(
    problem_file: Path,
    plan_file: Path,
    method: str,
    time_limit_s: float,
    seed: int,
    mipgap: float,
    max_microbatches: int | None,
    offload_strategy: str,
    cache_dir: Path | None,
) -> None:
    """Make a plan for PROBLEM, check it, write it to PLAN and say how good it is."""
    require_writable(plan_file, problem_file)
    problem = read_plannable(problem_file)

    from megatron_optpipe.core.check import require_valid
    from megatron_optpipe.core.plan import save_plan
    from megatron_optpipe.planner import PlannerOptions, make_plan
    from megatron_optpipe.planner.listsched import compiled_for
    from megatron_optpipe.view.report import plan_report

    options = PlannerOptions(
        method=method,
        time_limit_s=time_limit_s,
        seed=seed,
        mipgap=mipgap,
        max_microbatches=max_microbatches,
        offload_strategy=offload_strategy,
        cache_dir=cache_dir,
    )
    made = make_plan(problem, options)
    require_valid(problem, made)
    save_plan(made, plan_file)
    for line in plan_report(problem, made):
        click.echo(line)
    searched = method in ("auto", "search") and not (made.solver_status or "").startswith("optimal")
    if searched and not compiled_for(time_limit_s):
        click.echo(UNCOMPILED, err=True)
    click.echo(f"written to {plan_file}")
