"""``optpipe compare PROBLEM``: every method and classic schedule in one table."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from megatron_optpipe.cli.arguments import problem_argument, seed_option, time_limit_option
from megatron_optpipe.cli.files import read_plannable


@click.command(short_help="Compare every method on one problem.")
@problem_argument()
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values instead of a table.")
@time_limit_option("10", "Planning time of each method that has one.")
@seed_option()
def compare(problem_file: Path, as_csv: bool, time_limit_s: float, seed: int) -> None:
    """Compare every method and classic schedule on PROBLEM.

    Makespan, bubble, own span, peak memory of each device, moved bytes, time to plan, and whether
    the memory suffices, or by how much not.
    """
    problem = read_plannable(problem_file)

    from megatron_optpipe.compare import compare_methods
    from megatron_optpipe.view.tables import comparison_csv, print_comparison

    rows = compare_methods(problem, time_limit_s=time_limit_s, seed=seed)
    if as_csv:
        click.echo(comparison_csv(rows), nl=False)
    else:
        # None where the caller closed it (>&-).
        print_comparison(problem, rows, sys.stdout or io.StringIO())
