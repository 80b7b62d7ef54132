"""What is inserted into a Megatron checkout, by line of versions: ``patches/*/insert.toml``."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_optpipe.core.errors import OptPipeError

PATCHES = Path(__file__).resolve().parent.parent / "patches"

#: The file of a checkout that says which version it is.
VERSION_FILE = "megatron/core/package_info.py"

Version = tuple[int, int, int]


class PatchError(OptPipeError):
    """A checkout that cannot be patched or reverted: names the file, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Insert:
    """Some lines and their place: before the one ``return NAME`` of a function's body."""

    file: str
    function: str
    parameters: tuple[str, ...]
    before_return_of: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PatchSet:
    """All that is inserted into checkouts from one version up to another (not included)."""

    name: str
    from_version: Version
    below_version: Version
    inserts: tuple[Insert, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Files to change, each once, in order of first mention."""
        return tuple(dict.fromkeys(insert.file for insert in self.inserts))

    def of_file(self, file: str) -> tuple[Insert, ...]:
        """The inserts of one file, in order of mention."""
        return tuple(insert for insert in self.inserts if insert.file == file)


def load_patch_sets(folder: Path = PATCHES) -> tuple[PatchSet, ...]:
    """All patch sets of ``folder``, the oldest version first.

    Raises:
        PatchError: there is none, which means a broken installation.
    """
    sets = [
        _from_toml(path.parent.name, tomllib.loads(path.read_text(encoding="utf-8")))
        for path in folder.glob("*/insert.toml")
    ]
    if not sets:
        raise PatchError(f"{folder}: no patch sets here; reinstall megatron-optpipe")
    return tuple(sorted(sets, key=lambda patch_set: patch_set.from_version))


def checkout_version(root: Path) -> Version:
    """The version of the Megatron checkout at ``root``, read without importing it.

    Raises:
        PatchError: not a checkout, or its version is not written as it always was.
    """
    path = root / VERSION_FILE
    if not path.is_file():
        raise PatchError(
            f"{root}: no Megatron-LM checkout ({VERSION_FILE} is missing); "
            "give the folder that holds megatron/"
        )
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise PatchError(f"{VERSION_FILE}: not Python ({error}); restore it") from None
    numbers: dict[str, int] = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, int)
        ):
            numbers[node.targets[0].id] = node.value.value
    try:
        return (numbers["MAJOR"], numbers["MINOR"], numbers["PATCH"])
    except KeyError as error:
        raise PatchError(
            f"{VERSION_FILE}: no number {error.args[0]} in it, so the version is unknown; "
            "restore it"
        ) from None


def patch_set_for(version: Version, sets: tuple[PatchSet, ...]) -> PatchSet:
    """The patch set for this version of Megatron.

    Raises:
        PatchError: there is none; names those there are.
    """
    for patch_set in sets:
        if patch_set.from_version <= version < patch_set.below_version:
            return patch_set
    known = ", ".join(
        f"{_dotted(s.from_version)} up to before {_dotted(s.below_version)}" for s in sets
    )
    raise PatchError(
        f"Megatron {_dotted(version)}: unknown version; known: {known}; "
        "check out a known one (such as branch core_r0.19.0)"
    )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _version(text: str) -> Version:
    major, minor, patch = map(int, text.split("."))
    return major, minor, patch


def _from_toml(name: str, table: Mapping[str, Any]) -> PatchSet:
    inserts = tuple(
        Insert(
            file=entry["file"],
            function=entry["function"],
            parameters=tuple(entry["parameters"]),
            before_return_of=entry["before_return_of"],
            lines=tuple(entry["lines"]),
        )
        for entry in table["insert"]
    )
    return PatchSet(
        name, _version(table["from_version"]), _version(table["below_version"]), inserts
    )
