"""Files that are wrong in every way we could think of: one line, exit code 2, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runner import optpipe, refused

VECTORS = Path(__file__).parent / "core" / "vectors"
PROBLEM = VECTORS / "tiny.problem.json"
OFFLOAD = VECTORS / "offload4x8.problem.json"
PLAN = VECTORS / "tiny.plan.json"

BROKEN_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"  \n ",
    "not json": b"microbatches: 8",
    "cut off": b'{"schema": "optpipe.problem/1", ',
    "trailing comma": b'{"schema": "optpipe.problem/1",}',
    "two documents": b"{} {}",
    "a list": b"[]",
    "a number": b"1",
    "a string": b'"optpipe.problem/1"',
    "null": b"null",
    "NaN": b'{"p2p_ms": NaN}',
    "infinity": b'{"p2p_ms": Infinity}',
    "minus infinity": b'{"p2p_ms": -Infinity}',
    "overflowing": b'{"p2p_ms": 1e999}',
    "endless integer": b'{"p2p_ms": ' + b"9" * 5000 + b"}",
    "duplicate key": b'{"schema": "optpipe.problem/1", "schema": "optpipe.problem/1"}',
    "latin-1": '{"name": "caf\u00e9"}'.encode("latin-1"),
    "utf-16": '{"name": "x"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "zero bytes": b"\0" * 100,
    "lone surrogate": b'{"name": "\\ud800"}',
    "deep list": b"[" * 100_000,
    "deep closed list": b"[" * 50_000 + b"]" * 50_000,
    "deep object": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "binary": bytes(range(256)),
    "long string": b'{"schema": "' + b"x" * 100_000 + b'"}',
    "newlines in key": b'{"a\\nb\\u001b[31m": 1}',
}


@pytest.mark.parametrize("name", sorted(BROKEN_TEXTS))
@pytest.mark.parametrize("role", ["problem", "plan"])
def test_broken_text(tmp_path: Path, name: str, role: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(BROKEN_TEXTS[name])
    files = (bad, PLAN) if role == "problem" else (PROBLEM, bad)
    line = refused(optpipe("check", *files))
    assert "bad.json" in line
    assert len(line) < 1000
    assert line.isascii() or name == "latin-1"


@pytest.mark.parametrize("command", ["check", "show", "rehearse"])
@pytest.mark.parametrize("bad", ["missing.json", ".", "no/such/folder/p.json", "x" * 300])
def test_paths_that_are_no_files(tmp_path: Path, command: str, bad: str) -> None:
    output = ("-o", tmp_path / "x.json") if command == "show" else ()
    refused(optpipe(command, tmp_path / bad, PLAN, *output))
    refused(optpipe(command, PROBLEM, tmp_path / bad, *output))


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    0.5,
    -0.0,
    1e308,
    10**400,
    -(10**400),
    2**63,
    "",
    "1",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
)


def _places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON document."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _mutated(document: Any, dice: random.Random) -> Any:
    """The document with one thing wrong (mostly: a few mutations happen to be harmless)."""
    changed = copy.deepcopy(document)
    path = dice.choice(list(_places(changed)))
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    action = dice.randrange(4)
    if action == 0:
        del parent[path[-1]]
    elif action == 1 and isinstance(parent, dict):
        parent["unknown_key"] = 1
    elif action == 2 and isinstance(parent, list):
        parent.append(copy.deepcopy(dice.choice(parent)))
    else:
        parent[path[-1]] = dice.choice(ODD_VALUES)
    return changed


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("source", [PROBLEM, OFFLOAD], ids=["tiny", "offload"])
def test_mutated_problem(tmp_path: Path, source: Path, seed: int) -> None:
    """A mutated problem is refused in one line, or it is another problem than the plan's."""
    dice = random.Random(seed)
    original = json.loads(source.read_text())
    bad = tmp_path / "bad.json"
    for _ in range(25):
        changed = _mutated(original, dice)
        bad.write_text(json.dumps(changed))
        outcome = optpipe("check", bad, PLAN)
        same = {**changed, "name": 0, "notes": 0} if isinstance(changed, dict) else None
        if outcome.code == 0:
            assert same == {**json.loads(PROBLEM.read_text()), "name": 0, "notes": 0}
        elif outcome.code == 1:
            assert "digest" in refused(outcome, code=1)
        else:
            refused(outcome)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("p2p_ms", 2**63),
        ("p2p_ms", 1e308),
        ("num_microbatches", 10**9),
        ("num_microbatches", 10**7),
    ],
)
def test_sizes_that_no_plan_can_have(tmp_path: Path, field: str, value: float) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(json.loads(PROBLEM.read_text()) | {field: value}))
    line = refused(optpipe("plan", bad, "-o", tmp_path / "plan.json"))
    assert "at most" in line


@pytest.mark.parametrize("seed", range(20))
def test_mutated_plan(tmp_path: Path, seed: int) -> None:
    """A mutated plan is refused as a file (2), found invalid (1), or truly valid."""
    dice = random.Random(seed)
    original = json.loads(PLAN.read_text())
    bad = tmp_path / "bad.json"
    for _ in range(25):
        bad.write_text(json.dumps(_mutated(original, dice)))
        outcome = optpipe("check", PROBLEM, bad, "--grid")
        if outcome.code:
            refused(outcome, outcome.code)
        assert outcome.code in (0, 1, 2)
