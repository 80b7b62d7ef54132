"""Reading and writing the files that are named on a command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_optpipe.cli.failures import BadInput, CheckFailed

MAX_OPS = 3_000_000
"""F, B and W of a plan: ten times that of 64 devices, 4 chunks each and 512 microbatches."""

if TYPE_CHECKING:
    from megatron_optpipe.core.plan import Plan
    from megatron_optpipe.core.problem import Problem


def read_problem(path: Path) -> Problem:
    """The problem file. Raises ProblemError naming the file."""
    from megatron_optpipe.core.problem import load_problem

    return load_problem(path)


def read_plannable(path: Path) -> Problem:
    """The problem file, refused where its plan would be too large to make or to write."""
    problem = read_problem(path)
    num_ops = 3 * problem.num_stages * problem.num_microbatches
    if num_ops > MAX_OPS:
        raise BadInput(
            f"{path}: num_microbatches = {problem.num_microbatches} makes a plan of {num_ops} ops:"
            f" must be at most {MAX_OPS}; plan fewer microbatches"
        )
    return problem


def read_valid_plan(path: Path, problem: Problem, problem_path: Path) -> Plan:
    """The plan file, checked against the problem.

    Raises:
        PlanError: not a plan file.
        BadInput: made for another problem.
        CheckFailed: breaks a rule of the contract.
    """
    from megatron_optpipe.core.check import check

    plan = read_plan_of(path, problem, problem_path)
    violations = check(problem, plan)
    if violations:
        raise CheckFailed(
            f"{path}: not a valid plan, {violations[0]}"
            f" (all of it: optpipe check {problem_path} {path})"
        )
    return plan


def read_plan_of(path: Path, problem: Problem, problem_path: Path) -> Plan:
    """The plan file, refused where it was made for another problem, and not yet checked."""
    from megatron_optpipe.core.plan import load_plan

    plan = load_plan(path)
    if plan.problem_sha256 != problem.digest:
        raise BadInput(
            f"{path}: made for the problem {plan.problem_sha256[:12]}..., but {problem_path} is"
            f" {problem.digest[:12]}...; plan this problem anew or give the right problem file"
        )
    return plan


def require_writable(path: Path, *inputs: Path) -> None:
    """Refuse, before the work is done, an output that cannot be written or is one of the inputs."""
    folder = path.parent
    for file in inputs:
        if path.exists() and file.exists() and path.samefile(file):
            raise BadInput(f"{path}: is the input {file}; give the output another name")
    if path.is_dir():
        raise BadInput(f"{path}: is a directory; give the name of a file to write")
    if not folder.is_dir():
        raise BadInput(f"{path}: the directory {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise BadInput(f"{path}: cannot be written (permission denied); choose another place")
