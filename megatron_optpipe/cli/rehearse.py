"""``optpipe rehearse PROBLEM PLAN``: run a plan without Megatron, one process a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron_optpipe.cli.arguments import plan_argument, problem_argument
from megatron_optpipe.cli.files import read_problem, read_valid_plan


@click.command(short_help="Run a plan without Megatron and time it.")
@problem_argument()
@plan_argument()
@click.option(
    "--scale",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Multiply all times by this (2: twice as slow).",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many iterations to run; the best one counts.",
)
@click.option(
    "--rendezvous", is_flag=True, help="Let every send block until its receive is posted."
)
@click.option(
    "--log-dir",
    "log_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Write each device's measured-rank{r}.json there, for `optpipe show --measured DIR`.",
)
def rehearse(
    problem_file: Path,
    plan_file: Path,
    scale: float,
    iterations: int,
    rendezvous: bool,
    log_dir: Path | None,
) -> None:
    """Run PLAN with the real executor, one process a device, and compare with its times.

    Each compute op sleeps for its planned time; transfers move real bytes through the real lanes
    at the speed of the link. It shows that the plan ends before a cluster is booked for it.
    """
    problem = read_problem(problem_file)
    plan = read_valid_plan(plan_file, problem, problem_file)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)

    from megatron_optpipe.core.files import write_atomically
    from megatron_optpipe.runtime.rehearse import rehearse as run

    report = run(problem, plan, scale=scale, iterations=iterations, rendezvous=rendezvous)
    click.echo(str(report))
    if log_dir is not None:
        for device in report.devices:
            # The rehearsal may have scaled bytes down; the report has them in the plan's measure.
            in_plans_bytes = {"peak_bytes": device.peak_bytes, "moved_bytes": device.moved_bytes}
            text = json.dumps(device.measurement | in_plans_bytes) + "\n"
            write_atomically(log_dir / f"measured-rank{device.device}.json", text)
        click.echo(f"measurement of the last iteration written to {log_dir}")
