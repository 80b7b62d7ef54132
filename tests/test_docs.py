"""The documents say what is there: commands, options, flags, files, the generated page."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from megatron_optpipe.cli import app
from megatron_optpipe.cli.arguments import METHODS
from megatron_optpipe.cli.failures import EXIT_INTERNAL
from megatron_optpipe.megatron.arguments import add_arguments
from megatron_optpipe.view.unsupported import unsupported_markdown
from tests.cli_runner import optpipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDE = (DOCS / "user-guide.md").read_text()
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])


def _commands(text: str) -> Iterator[list[str]]:
    """The ``$ optpipe ...`` lines of the console blocks of a page."""
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for line in block.splitlines():
            if line.startswith("$ optpipe "):
                yield shlex.split(line.removeprefix("$ optpipe "), comments=True)


def _leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the words after it."""
    command: click.Command = app.optpipe
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def _options(command: click.Command) -> set[str]:
    return {name for p in command.params if isinstance(p, click.Option) for name in p.opts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page: Path) -> None:
    if not page.exists():
        pytest.skip("not written")
    for words in _commands(page.read_text()):
        command, rest = _leaf(words)
        assert not isinstance(command, click.Group), words
        given = {word.split("=")[0] for word in rest if word.startswith("-")}
        assert given <= _options(command) | {"--help"}, words


def test_the_worked_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, but for the rehearsal, which has tests of its own."""
    pytest.importorskip("matplotlib")
    section = re.search(r"## A worked example\n(.*?)\n## ", GUIDE, re.S)
    assert section is not None
    for file in (DOCS / "examples").iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    ran = []
    for words in _commands(section.group(1)):
        if words[0] == "rehearse" or "--measured" in words:
            continue
        outcome = optpipe(*words)
        assert outcome.code == 0, (words, outcome)
        ran.append(words[0])
    assert set(ran) == {"compare", "plan", "check", "show"}
    for name in ("four.plan.json", "gantt.png", "trace.json"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_example_is_as_the_guide_says() -> None:
    outcome = optpipe("compare", DOCS / "examples" / "four.problem.json", "--time-limit", "300ms")
    (classic,) = [line for line in outcome.out.splitlines() if line.strip().startswith("1f1b")]
    assert "no: device 0 lacks 1.00 GB" in classic


def test_the_guide_has_every_command_and_option() -> None:
    for name, command in app.optpipe.commands.items():
        assert f"### optpipe {name}" in GUIDE
        leaves = command.commands.values() if isinstance(command, click.Group) else [command]
        for leaf in leaves:
            assert f"{leaf.name}" in GUIDE
            for option in _options(leaf):
                assert f"`{option}" in GUIDE, option


def test_the_guide_has_every_method() -> None:
    for method in METHODS:
        assert f"`{method}`" in GUIDE


def _training_flags() -> set[str]:
    parser = add_arguments(ArgumentParser(add_help=False))
    return {name for action in parser._actions for name in action.option_strings}


def test_the_guide_has_every_training_flag_and_no_page_invents_one() -> None:
    flags = _training_flags()
    for flag in flags:
        assert f"`{flag}" in GUIDE
    for page in PAGES:
        if page.exists():
            mentioned = set(re.findall(r"--optpipe-[a-z0-9-]*[a-z0-9]", page.read_text()))
            assert mentioned <= flags, page.name


def test_the_unsupported_page_is_made_from_the_table() -> None:
    """After a change of the table: ``optpipe unsupported > docs/unsupported.md``."""
    assert (DOCS / "unsupported.md").read_text() == unsupported_markdown()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    if not page.exists():
        pytest.skip("not written")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_files_and_folders_of_the_architecture_page_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    package = ROOT / "megatron_optpipe"
    for name in set(re.findall(r"`([a-z_]+/[a-z_]*(?:\.py)?)`", text)):
        assert (package / name).exists(), name


def test_names_of_the_architecture_page_exist() -> None:
    """Functions that the page names in backquotes are defined somewhere in the package."""
    text = (DOCS / "architecture.md").read_text()
    defined = set()
    for path in (ROOT / "megatron_optpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
    for name in ("duration_ms", "memory_change", "make_plan", "lower", "prove_ends", "time_orders"):
        assert f"`{name}`" in text
        assert name in defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_ascii_or_say_why(page: Path) -> None:
    if not page.exists():
        pytest.skip("not written")
    assert page.read_text().isascii()


def test_exit_codes_of_the_guide() -> None:
    from megatron_optpipe.cli import failures

    codes = {value for name, value in vars(failures).items() if name.startswith("EXIT_")}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE, re.M)}
    assert codes == listed
    assert EXIT_INTERNAL in listed
