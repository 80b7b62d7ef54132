"""The command line: frozen names, exit codes, one-line errors, and what each command writes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from megatron_optpipe.cli import app
from megatron_optpipe.cli.arguments import METHODS
from megatron_optpipe.cli.failures import user_error
from megatron_optpipe.core import (
    Deadlock,
    Plan,
    PlanInvalid,
    check,
    load_plan,
    load_problem,
    save_plan,
    save_problem,
)
from megatron_optpipe.view.text import MAX_LINE, one_line
from tests.cli_runner import optpipe, refused
from tests.zoo import ZOO

VECTORS = Path(__file__).parent / "core" / "vectors"
PROBLEM = VECTORS / "tiny.problem.json"
OFFLOAD = VECTORS / "offload4x8.problem.json"
PLAN = VECTORS / "tiny.plan.json"
BROKEN = json.loads((VECTORS / "tiny.broken-plans.json").read_text())

FROZEN = {
    "": ["--traceback", "--version"],
    "check": ["--grid", "PLAN", "PROBLEM"],
    "compare": ["--csv", "--seed", "--time-limit", "PROBLEM"],
    "patch apply": ["DIR"],
    "patch export": ["--output", "-o", "DIR"],
    "patch revert": ["DIR"],
    "patch status": ["DIR"],
    "plan": [
        "--cache-dir",
        "--max-microbatches",
        "--method",
        "--mipgap",
        "--offload-strategy",
        "--output",
        "--seed",
        "--time-limit",
        "-o",
        "PROBLEM",
    ],
    "rehearse": ["--iterations", "--log-dir", "--rendezvous", "--scale", "PLAN", "PROBLEM"],
    "show": ["--measured", "--output", "-o", "PLAN", "PROBLEM"],
    "unsupported": [],
}
"""Scripts of users depend on these: add, never rename or remove."""


def _names(command: click.Command) -> list[str]:
    names: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names += parameter.opts
        else:
            names.append(parameter.make_metavar(click.Context(command)))
    return sorted(names)


def _commands(group: click.Group, prefix: str = "") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= _commands(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = _names(command)
    return found


def test_commands_and_options_are_frozen() -> None:
    assert {"": _names(app.optpipe)} | _commands(app.optpipe) == FROZEN


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    script = (
        "import sys, megatron_optpipe.cli;"
        "heavy = {'torch', 'scipy', 'matplotlib', 'numba', 'rich', 'megatron', 'jsonschema'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments: tuple[str, ...]) -> None:
    outcome = optpipe(*arguments)
    assert outcome.code == 0
    for name in FROZEN:
        assert name.split(" ")[0] in outcome.out


def test_every_command_has_help() -> None:
    for name in FROZEN:
        outcome = optpipe(*name.split(), "--help")
        assert outcome.code == 0
        assert "Usage: optpipe" in outcome.out


def test_version() -> None:
    assert optpipe("--version").out.startswith("optpipe 0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("--frobnicate",),
        ("plan",),
        ("plan", PROBLEM),
        ("plan", PROBLEM, "-o"),
        ("plan", PROBLEM, "-o", "x", "--method", "best"),
        ("plan", PROBLEM, "-o", "x", "--time-limit", "soon"),
        ("plan", PROBLEM, "-o", "x", "--time-limit", "0"),
        ("plan", PROBLEM, "-o", "x", "--time-limit", "-1"),
        ("plan", PROBLEM, "-o", "x", "--time-limit", "nan"),
        ("plan", PROBLEM, "-o", "x", "--seed", "one"),
        ("plan", PROBLEM, "-o", "x", "--mipgap", "2"),
        ("plan", PROBLEM, "-o", "x", "--max-microbatches", "0"),
        ("check", PROBLEM),
        ("check", PROBLEM, PLAN, "more"),
        ("compare",),
        ("rehearse", PROBLEM, PLAN, "--scale", "0"),
        ("rehearse", PROBLEM, PLAN, "--iterations", "0"),
        ("show", PROBLEM, PLAN),
        ("patch", "frobnicate", "."),
        ("patch", "apply"),
    ],
    ids=lambda arguments: " ".join(str(a) for a in arguments[:1] + arguments[-2:]),
)
def test_usage_errors_are_one_line(arguments: tuple[object, ...]) -> None:
    refused(optpipe(*arguments))


def test_a_good_plan_checks() -> None:
    outcome = optpipe("check", PROBLEM, PLAN)
    assert outcome.code == 0
    assert outcome.err == ""
    assert "valid" in outcome.out
    assert "11.20 ms" in outcome.out


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_plan_fails_with_its_rule(name: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(BROKEN[name]["plan"]))
    outcome = optpipe("check", PROBLEM, bad)
    rule = BROKEN[name]["rule"]
    shown = rule if rule == "digest" else f"rule {rule}:"
    assert shown in refused(outcome, code=1)
    assert shown in outcome.out


def test_the_grid_points_at_the_wrong_op(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(BROKEN["w_before_b"]["plan"]))
    assert ">>W(0,0)<<" in optpipe("check", PROBLEM, bad, "--grid").out


def test_a_plan_for_another_problem_is_refused_by_all() -> None:
    assert "digest" in refused(optpipe("check", OFFLOAD, PLAN), code=1)
    assert "made for the problem" in refused(optpipe("rehearse", OFFLOAD, PLAN))


def test_show_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    assert ".gif" in refused(optpipe("show", PROBLEM, PLAN, "-o", tmp_path / "x.gif"))
    refused(optpipe("show", PROBLEM, PLAN, "-o", tmp_path / "no" / "x.png"))
    refused(optpipe("show", PROBLEM, PLAN, "-o", tmp_path))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(BROKEN["missing_w"]["plan"]))
    refused(optpipe("show", PROBLEM, bad, "-o", tmp_path / "x.png"), code=1)
    line = refused(
        optpipe("show", PROBLEM, PLAN, "-o", tmp_path / "x.json", "--measured", tmp_path)
    )
    assert "measured-rank" in line


def test_rehearse_reports_and_its_measurement_can_be_shown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    log = tmp_path / "log"
    options = ("--iterations", "1", "--scale", "2", "--rendezvous", "--log-dir", log)
    outcome = optpipe("rehearse", PROBLEM, PLAN, *options)
    assert outcome.code == 0, outcome
    assert "planned 22.4 ms" in outcome.out
    assert "rendezvous" in outcome.out
    drawn = optpipe("show", PROBLEM, PLAN, "-o", tmp_path / "t.json", "--measured", log)
    assert drawn.code == 0, drawn
    names = [e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert names.count("F(0,0)") == 2


def test_a_rehearsal_that_fails_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from megatron_optpipe.runtime import rehearse

    def fail(*_: object, **__: object) -> None:
        raise rehearse.RehearsalFailed("rank 1 stood still in B(1,0)")

    monkeypatch.setattr(rehearse, "rehearse", fail)
    assert "rank 1 stood still" in refused(optpipe("rehearse", PROBLEM, PLAN), code=1)


@pytest.mark.parametrize("ending", ["png", "svg", "json"])
def test_show_writes_the_file(tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"gantt.{ending}"
    outcome = optpipe("show", PROBLEM, PLAN, "-o", output)
    assert outcome.code == 0, outcome
    head = {"png": b"\x89PNG", "svg": b"<?xml", "json": b"{"}[ending]
    assert output.read_bytes().startswith(head)


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_optpipe.core.problem.load_problem", interrupt)
    outcome = optpipe("check", PROBLEM, PLAN)
    assert outcome.code == 130
    assert outcome.err.strip() == "optpipe: interrupted"


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(path: Path) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("megatron_optpipe.core.problem.load_problem", fault)
    outcome = optpipe("check", PROBLEM, PLAN)
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "ZeroDivisionError: a b" in outcome.err
    with pytest.raises(ZeroDivisionError):
        optpipe("--traceback", "check", PROBLEM, PLAN)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(optpipe("show", PROBLEM, PLAN, "-o", tmp_path / "x.png"))
    assert "megatron-optpipe[view]" in line


def test_an_unwritable_output_is_found_before_the_work(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "no" / "plan.json", PROBLEM / "plan.json"):
        refused(optpipe("plan", PROBLEM, "-o", output, "--method", "1f1b"))


def test_an_input_is_never_overwritten(tmp_path: Path) -> None:
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    problem.write_bytes(PROBLEM.read_bytes())
    plan.write_bytes(PLAN.read_bytes())
    (tmp_path / "link.json").symlink_to(problem)
    for output in (problem, tmp_path / "link.json"):
        refused(optpipe("plan", problem, "-o", output, "--method", "1f1b"))
    refused(optpipe("show", problem, plan, "-o", plan))
    assert problem.read_bytes() == PROBLEM.read_bytes()
    assert plan.read_bytes() == PLAN.read_bytes()


def test_output_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    """A link stays a link, and what is no regular file is written to, not replaced."""
    link, real, pipe = tmp_path / "link.json", tmp_path / "real.json", tmp_path / "pipe"
    link.symlink_to(real)
    arguments = ("plan", PROBLEM, "--method", "1f1b", "-o")
    assert optpipe(*arguments, link).code == 0
    assert link.is_symlink()
    assert load_plan(real).method == "1f1b"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert optpipe(*arguments, pipe).code == 0
        written, _ = reader.communicate(timeout=60)
    assert pipe.is_fifo()
    assert written == real.read_bytes()


@pytest.mark.parametrize(
    ("tail", "code", "lines"),
    [
        ("unsupported | true; exit 0", 0, 0),
        (f"check {PROBLEM} {PLAN} >&-", 0, 0),
        (f"compare {PROBLEM} --time-limit 100ms >&-", 0, 0),
        (f"check {PROBLEM} nowhere 2>&-", 2, 0),
        (f"check {PROBLEM} {PLAN} >/dev/full", 2, 1),
    ],
)
def test_closed_and_full_outputs(tail: str, code: int, lines: int) -> None:
    command = f"set -o pipefail; {sys.executable} -m megatron_optpipe.cli {tail}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == code
    # A busy machine may add the planner's warning that a solver ran out of its 100 ms.
    said = [x for x in done.stderr.splitlines() if not x.startswith("optpipe: warning:")]
    assert len(said) == lines


@pytest.mark.parametrize(
    ("error", "code"),
    [(PlanInvalid("x"), 1), (Deadlock("x"), 1), (OSError(28, "disk full", "f"), 2)],
)
def test_exit_codes(error: Exception, code: int) -> None:
    known = user_error(error)
    assert known is not None
    assert known.exit_code == code


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "another place"), (errno.EACCES, "permissions")],
)
def test_a_failure_of_the_file_system_says_what_to_do(number: int, remedy: str) -> None:
    known = user_error(OSError(number, "It failed", "some/file"))
    assert known is not None
    assert known.message.startswith("some/file: It failed; ")
    assert remedy in known.message


def test_one_line_is_one_short_printable_line() -> None:
    line = one_line("a\n\tb \x1b[31m" + "x" * 10_000)
    assert line.startswith("a b \\x1b[31m")
    assert len(line) <= MAX_LINE


def test_unsupported_prints_the_page() -> None:
    outcome = optpipe("unsupported")
    assert outcome.code == 0
    assert outcome.out.startswith("# What cannot be combined")


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "zb-h1", "zb-h2", "greedy", "auto"])
def test_plan_makes_a_valid_plan_and_reports_it(tmp_path: Path, method: str) -> None:
    output = tmp_path / "plan.json"
    # The offload example holds three microbatches; the classic orders do not fit there.
    problem_file = OFFLOAD if method in ("greedy", "auto") else tmp_path / "roomy.json"
    if problem_file != OFFLOAD:
        document = json.loads(OFFLOAD.read_text())
        for device in document["devices"]:
            device["memory_bytes"] = 20 * 10**9
        problem_file.write_text(json.dumps(document))
    outcome = optpipe(
        "plan", problem_file, "-o", output, "--method", method, "--time-limit", "500ms"
    )
    assert outcome.code == 0, outcome
    problem, plan = load_problem(problem_file), load_plan(output)
    assert check(problem, plan) == []
    for word in ("method", "makespan", "bubble", "bound", "peak", "of 3.00 GB"):
        assert word in outcome.out or problem_file != OFFLOAD
    assert optpipe("check", problem_file, output).code == 0


def test_the_same_seed_gives_the_same_plan_but_for_times_of_planning(tmp_path: Path) -> None:
    plans = []
    for name in ("a.json", "b.json"):
        assert optpipe("plan", OFFLOAD, "-o", tmp_path / name, "--method", "greedy").code == 0
        plans.append(load_plan(tmp_path / name))
    first, second = plans
    assert first.devices == second.devices
    assert first.makespan_ms == second.makespan_ms


@pytest.mark.parametrize("compiled", [False, True])
def test_a_search_without_its_compiled_form_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    from megatron_optpipe.planner import listsched

    monkeypatch.setattr(listsched, "compiled_for", lambda time_limit_s: compiled)
    output = tmp_path / "plan.json"
    done = optpipe("plan", OFFLOAD, "-o", output, "--method", "search", "--time-limit", "200ms")
    assert done.code == 0, done
    assert ("planner.warm" in done.err) is not compiled
    assert done.err.count("\n") == (0 if compiled else 1)


def test_a_limit_that_holds_no_microbatch_is_refused(tmp_path: Path) -> None:
    document = json.loads(PROBLEM.read_text())
    document["devices"][1]["memory_bytes"] = 10
    small = tmp_path / "small.json"
    small.write_text(json.dumps(document))
    refused(optpipe("plan", small, "-o", tmp_path / "plan.json", "--time-limit", "1"))
    assert not (tmp_path / "plan.json").exists()


def test_methods_are_those_of_the_planner() -> None:
    from megatron_optpipe import planner

    assert set(METHODS) == set(planner.METHODS) | {"auto"}


def test_zoo_survives_every_reading_command(tmp_path: Path) -> None:
    problem_file, plan_file = tmp_path / "problem.json", tmp_path / "plan.json"
    for make in ZOO.values():
        problem, plan = make()
        save_problem(problem, problem_file)
        save_plan(plan, plan_file)
        assert optpipe("check", problem_file, plan_file).code == 0
        output = tmp_path / "trace.json"
        assert optpipe("show", problem_file, plan_file, "-o", output).code == 0
        assert isinstance(Plan.from_dict(json.loads(plan_file.read_text())), Plan)
