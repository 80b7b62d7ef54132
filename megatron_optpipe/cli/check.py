"""``optpipe check PROBLEM PLAN``: does the plan obey every rule of the contract?"""

from __future__ import annotations

from pathlib import Path

import click

from megatron_optpipe.cli.arguments import plan_argument, problem_argument
from megatron_optpipe.cli.failures import CheckFailed
from megatron_optpipe.cli.files import read_problem
from megatron_optpipe.units import format_ms
from megatron_optpipe.view.text import one_line

MAX_SHOWN = 20


@click.command(short_help="Check a plan against its problem.")
@problem_argument()
@plan_argument()
@click.option("--grid", is_flag=True, help="Show the grid of ops with an arrow at the wrong one.")
def check(problem_file: Path, plan_file: Path, grid: bool) -> None:
    """Check that PLAN obeys every rule of the contract for PROBLEM.

    Ends with 0 where it does, and with 1 where it does not; every broken rule is listed with the
    op and the device.
    """
    from megatron_optpipe.core.check import check as violations_of
    from megatron_optpipe.core.check import render_grid
    from megatron_optpipe.core.plan import load_plan
    from megatron_optpipe.core.timing import summarize

    problem = read_problem(problem_file)
    plan = load_plan(plan_file)
    violations = violations_of(problem, plan)
    if not violations:
        summary = summarize(problem, plan)
        click.echo(
            f"valid: {plan_file} ({one_line(plan.method)}) for {problem_file},"
            f" makespan {format_ms(summary.makespan_ms)}, bubble {summary.bubble:.1%}"
        )
        return
    for violation in violations[:MAX_SHOWN]:
        click.echo(str(violation))
    if len(violations) > MAX_SHOWN:
        click.echo(f"... and {len(violations) - MAX_SHOWN} more")
    if grid:
        click.echo(render_grid(problem, plan, violations[0]))
    count = f"{len(violations)} violations, the first" if len(violations) > 1 else "1 violation"
    raise CheckFailed(f"{plan_file}: not a valid plan, {count}: {violations[0]}")
