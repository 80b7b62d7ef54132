"""``optpipe show PROBLEM PLAN -o gantt.png``: a picture or a trace of a plan."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_optpipe.cli.arguments import plan_argument, problem_argument
from megatron_optpipe.cli.failures import BadInput
from megatron_optpipe.cli.files import read_problem, read_valid_plan, require_writable

PICTURES = (".png", ".svg", ".pdf")
TRACES = (".json",)


@click.command(short_help="Draw a plan, or a plan and its measurement.")
@problem_argument()
@plan_argument()
@click.option(
    "-o",
    "--output",
    "output_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="gantt.png, gantt.svg or gantt.pdf for a picture; trace.json for Perfetto.",
)
@click.option(
    "--measured",
    "measured_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Draw the measurement of a run too: its --optpipe-log-dir.",
)
def show(problem_file: Path, plan_file: Path, output_file: Path, measured_dir: Path | None) -> None:
    """Draw PLAN: time to the right, a row for each device, memory below.

    The ending of FILE decides: a picture, or a Chrome trace that opens in ui.perfetto.dev.
    """
    ending = output_file.suffix.lower()
    if ending not in PICTURES + TRACES:
        raise BadInput(
            f"{output_file}: unknown ending {ending!r}; use one of {', '.join(PICTURES + TRACES)}"
        )
    require_writable(output_file, problem_file, plan_file)
    problem = read_problem(problem_file)
    plan = read_valid_plan(plan_file, problem, problem_file)
    measured = None
    if measured_dir is not None:
        from megatron_optpipe.view.measured import read_measured

        measured = read_measured(problem, measured_dir)
    if ending in TRACES:
        from megatron_optpipe.core.files import write_atomically
        from megatron_optpipe.view.trace import trace_json

        write_atomically(output_file, trace_json(problem, plan, measured))
    else:
        from megatron_optpipe.view.gantt import save_gantt

        save_gantt(problem, plan, output_file, measured)
    click.echo(f"written to {output_file}")
