"""Patching a checkout: all or nothing, twice is once, and back to the last byte."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_optpipe.megatron import patcher, patcher_files
from megatron_optpipe.megatron.patcher import PatchError
from tests.cli_runner import optpipe, refused
from tests.megatron.checkouts import (
    ARGUMENTS,
    SCHEDULES,
    TREE,
    contents,
    copy_installed,
    git,
    write_tree,
)

ARGUMENTS_TEXT = TREE[ARGUMENTS].encode()
SCHEDULES_TEXT = TREE[SCHEDULES].encode()

# Ways in which a file of the same meaning may be written.
SHAPES: dict[str, bytes] = {
    "plain": ARGUMENTS_TEXT,
    "crlf": ARGUMENTS_TEXT.replace(b"\n", b"\r\n"),
    "tabs": ARGUMENTS_TEXT.replace(b"    ", b"\t"),
    "byte order mark": b"\xef\xbb\xbf" + ARGUMENTS_TEXT,
    "latin-1": b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + ARGUMENTS_TEXT,
    "form feeds": ARGUMENTS_TEXT.replace(b"\n\n\n", b"\n\n\x0c\n"),
    "line separators in a string": b"X = '\xe2\x80\xa8 \x0b \x1c'\n" + ARGUMENTS_TEXT,
    "no last newline": ARGUMENTS_TEXT[: ARGUMENTS_TEXT.index(b"\n\n\ndef last")],
    "blanks at the end": ARGUMENTS_TEXT + b"\n \n\t",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_tree(tmp_path)


def refusal(root: Path) -> str:
    """What ``apply`` says; the tree must not have changed."""
    before = contents(root)
    with pytest.raises(PatchError) as caught:
        patcher.apply(root)
    assert contents(root) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shape", SHAPES)
def test_apply_then_revert_gives_the_same_bytes(tmp_path: Path, shape: str) -> None:
    root = write_tree(tmp_path, arguments=SHAPES[shape])
    before = contents(root)
    assert patcher.status(root).state == "clean"
    assert sorted(patcher.apply(root)) == sorted([ARGUMENTS, SCHEDULES])
    assert patcher.status(root).state == "applied"
    patched = contents(root)[ARGUMENTS]
    ast.parse(patched)
    if shape == "crlf":
        assert patched.count(b"\n") == patched.count(b"\r\n")
    assert sorted(patcher.revert(root)) == sorted([ARGUMENTS, SCHEDULES])
    assert contents(root) == before
    assert git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exported_patch_does_what_apply_does(tmp_path: Path, shape: str) -> None:
    root = write_tree(tmp_path, arguments=SHAPES[shape])
    exported = patcher.export(root)
    patcher.apply(root)
    by_us = contents(root)
    assert patcher.export(root) == exported
    patcher.revert(root)
    git_apply = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(git_apply, cwd=root, input=exported, check=True)
    assert contents(root) == by_us
    assert patcher.revert(root)
    assert git(root, "status", "--porcelain") == ""


def test_an_exported_patch_never_replaces_a_file_that_it_patches(
    tmp_path: Path,
) -> None:
    checkout = write_tree(tmp_path / "checkout")
    before = contents(checkout)
    (tmp_path / "link.patch").symlink_to(checkout / ARGUMENTS)
    for output in (checkout / ARGUMENTS, tmp_path / "link.patch"):
        line = refused(optpipe("patch", "export", checkout, "-o", output))
        assert "is the input" in line
    assert contents(checkout) == before
    outcome = optpipe("patch", "export", checkout, "-o", tmp_path / "ours.patch")
    assert outcome.code == 0
    assert (tmp_path / "ours.patch").read_bytes() == patcher.export(checkout)


def test_applying_twice_changes_nothing(checkout: Path) -> None:
    patcher.apply(checkout)
    once = contents(checkout)
    assert patcher.apply(checkout) == []
    assert contents(checkout) == once


def test_reverting_an_unpatched_tree_changes_nothing(checkout: Path) -> None:
    assert patcher.revert(checkout) == []
    assert git(checkout, "status", "--porcelain") == ""


def test_the_users_changes_survive(checkout: Path) -> None:
    path = checkout / ARGUMENTS
    path.write_bytes(ARGUMENTS_TEXT.replace(b"default=1)", b"default=1)  # mine"))
    patcher.apply(checkout)
    # More of them after the patch: around it, and between our lines and the return.
    patched = path.read_bytes()
    after = patched.replace(b'"""Flags."""', b'"""Flags."""\nimport mine')
    after = after.replace(
        b"    return parser\n\ndef val", b"    mine(parser)\n    return parser\n\ndef val"
    )
    assert after.count(b"mine") == 3
    path.write_bytes(after)
    assert patcher.status(checkout).state == "applied"
    assert patcher.apply(checkout) == []
    patcher.revert(checkout)
    assert b"optpipe" not in path.read_bytes()
    wanted = ARGUMENTS_TEXT.replace(b"default=1)", b"default=1)  # mine")
    wanted = wanted.replace(b'"""Flags."""', b'"""Flags."""\nimport mine')
    wanted = wanted.replace(
        b"    return parser\n\ndef val", b"    mine(parser)\n    return parser\n\ndef val"
    )
    assert path.read_bytes() == wanted


def test_the_patched_functions_call_the_hook(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    def called(name: str) -> Any:
        return lambda value: calls.append((name, value)) or f"{name}({value})"

    names = ("add_arguments", "validate", "forward_backward_func")
    hook = types.SimpleNamespace(**{name: called(name) for name in names})
    package = types.ModuleType("megatron_optpipe.megatron")
    package.hook = hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_optpipe.megatron", package)
    patcher.apply(checkout)
    flags: dict[str, Any] = {}
    exec((checkout / ARGUMENTS).read_text(), flags)
    flags["_add_one"] = lambda parser: parser
    assert flags["add_megatron_arguments"]("parser") == "add_arguments(parser)"
    args = types.SimpleNamespace(one=1)
    assert flags["validate_args"](args) is args
    assert args.checked, "ours must come after Megatron's own validation"
    schedules: dict[str, Any] = {}
    exec((checkout / SCHEDULES).read_text(), schedules)
    chosen = schedules["get_forward_backward_func"](2)
    assert chosen == f"forward_backward_func({schedules['stock']})"
    assert [name for name, _ in calls] == list(names)


@pytest.mark.parametrize(
    ("find", "replace", "part"),
    [
        (
            b"def add_megatron_arguments(",
            b"def add_arguments(",
            "add_megatron_arguments() is defined 0",
        ),
        (b"def last(", b"def validate_args(", "validate_args() is defined 2 times"),
        (b"validate_args(args,", b"validate_args(namespace,", "no parameter 'args'"),
        (
            b"    return args\n\n\ndef last",
            b"    return wrap(args)\n\n\ndef last",
            "0 'return args'",
        ),
        (b"    # the last word\n", b"    return parser\n", "2 'return parser'"),
        (b"    # the last word\n    return", b"    x = 1; return", "statement before the return"),
        (b"import argparse\n", b"import argparse:\n", "not valid Python"),
        (b"import argparse\n", b"import argparse\nX = 1  # optpipe patch\n", "line 3"),
    ],
)
def test_a_changed_place_is_refused_by_name(
    tmp_path: Path, find: bytes, replace: bytes, part: str
) -> None:
    changed = ARGUMENTS_TEXT.replace(find, replace)
    assert changed != ARGUMENTS_TEXT
    root = write_tree(tmp_path, arguments=changed)
    message = refusal(root)
    assert message.startswith(ARGUMENTS)
    assert part in message
    assert patcher.status(root).state == "changed"
    with pytest.raises(PatchError):
        patcher.export(root)


def test_one_bad_file_leaves_the_good_ones_alone(tmp_path: Path) -> None:
    root = write_tree(tmp_path, schedules=b"def something_else():\n    pass\n")
    assert refusal(root).startswith(SCHEDULES)


def test_a_missing_file_is_named(checkout: Path) -> None:
    (checkout / SCHEDULES).unlink()
    assert refusal(checkout).startswith(f"{SCHEDULES}: missing")


@pytest.mark.parametrize("version", [(0, 18, 9), (0, 20, 0), (1, 19, 0)])
def test_an_unknown_version_is_refused_with_those_known(
    tmp_path: Path, version: tuple[int, int, int]
) -> None:
    text = "MAJOR = {}\nMINOR = {}\nPATCH = {}\n".format(*version)
    message = refusal(write_tree(tmp_path, version=text.encode()))
    assert "{}.{}.{}".format(*version) in message
    assert "0.19.0 up to before 0.20.0" in message


@pytest.mark.parametrize("text", [b"VERSION = 'unknown'\n", b"MAJOR = 0\nMINOR = '19'\n", b"(\n"])
def test_a_version_that_cannot_be_read_is_refused(tmp_path: Path, text: bytes) -> None:
    assert "package_info.py" in refusal(write_tree(tmp_path, version=text))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    assert "no Megatron-LM checkout" in refusal(tmp_path)


def test_a_changed_line_of_ours_is_the_users(checkout: Path) -> None:
    patcher.apply(checkout)
    path = checkout / ARGUMENTS
    edited = path.read_bytes().replace(b"add_arguments(parser)  #", b"add_arguments(parser, 1)  #")
    path.write_bytes(edited)
    for attempt in (patcher.revert, patcher.apply, patcher.export):
        with pytest.raises(PatchError, match=r"arguments.py: line 1\d was inserted by optpipe"):
            attempt(checkout)
    assert path.read_bytes() == edited
    assert patcher.status(checkout).state == "changed"


def test_a_half_patched_tree_is_completed_or_reverted(checkout: Path) -> None:
    patcher.apply(checkout)
    whole = contents(checkout)
    (checkout / SCHEDULES).write_bytes(SCHEDULES_TEXT)
    found = patcher.status(checkout)
    assert found.state == "partly applied"
    assert found.files == {ARGUMENTS: "applied", SCHEDULES: "clean"}
    assert patcher.apply(checkout) == [SCHEDULES]
    assert contents(checkout) == whole
    (checkout / SCHEDULES).write_bytes(SCHEDULES_TEXT)
    assert patcher.revert(checkout) == [ARGUMENTS]
    assert git(checkout, "status", "--porcelain") == ""


def test_revert_works_after_the_checkout_moved_on(checkout: Path) -> None:
    patcher.apply(checkout)
    version = checkout / "megatron/core/package_info.py"
    version.write_text(version.read_text().replace("19", "21"))
    assert len(patcher.revert(checkout)) == 2
    assert (checkout / ARGUMENTS).read_bytes() == ARGUMENTS_TEXT


@pytest.mark.parametrize("failing_call", [0, 1])
def test_a_failed_write_changes_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    before = contents(checkout)
    true_replace, calls = os.replace, []

    def replace(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == failing_call + 1:
            raise OSError(28, "No space left on device", str(target))
        true_replace(source, target)

    monkeypatch.setattr(patcher_files.os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        patcher.apply(checkout)
    monkeypatch.undo()
    assert contents(checkout) == before
    assert git(checkout, "status", "--porcelain") == ""


def test_modes_and_links_are_kept(checkout: Path, tmp_path: Path) -> None:
    real = checkout / "real_schedules.py"
    (checkout / SCHEDULES).rename(real)
    (checkout / SCHEDULES).symlink_to(real)
    (checkout / ARGUMENTS).chmod(0o755)
    patcher.apply(checkout)
    assert (checkout / SCHEDULES).is_symlink()
    assert b"optpipe" in real.read_bytes()
    assert (checkout / ARGUMENTS).stat().st_mode & 0o777 == 0o755


def test_the_installed_megatron_is_a_known_tree(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    root = copy_installed(tmp_path)
    before = contents(root)
    patcher.apply(root)
    added = git(root, "diff", "--numstat").split()
    assert added[1::3] == ["0", "0"], "only lines may be added"
    assert sum(map(int, added[0::3])) == 6
    assert patcher.status(root).state == "applied"
    for file in (ARGUMENTS, SCHEDULES):
        compile((root / file).read_bytes(), file, "exec")
    patcher.revert(root)
    assert contents(root) == before
    assert git(root, "status", "--porcelain") == ""
