"""Patch a Megatron-LM checkout so that ``pretrain_gpt.py --pipeline-schedule optpipe`` works.

``apply``, ``revert``, ``status`` and ``export`` work on a checkout's folder; nothing of Megatron is
imported. They look at the whole checkout before they write anything, change all files or none, and
never touch a line that is not theirs. Errors are ``PatchError``, one line each.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_optpipe.megatron.patcher_files import write_all
from megatron_optpipe.megatron.patcher_place import (
    inserted,
    is_inserted,
    marked_lines,
    without_inserts,
)
from megatron_optpipe.megatron.patcher_set import (
    PATCHES,
    PatchError,
    PatchSet,
    Version,
    checkout_version,
    load_patch_sets,
    patch_set_for,
)

__all__ = ["PatchError", "Status", "apply", "export", "revert", "status"]

State = Literal["clean", "applied", "partly applied", "changed"]


@dataclass(frozen=True, slots=True)
class Status:
    """How a checkout stands.

    ``state``: ``clean``; ``applied``; ``partly applied`` (some places have our lines, some do
    not); ``changed`` (a file is missing or not Python, or one of our lines is not as we wrote it).
    ``files``: the same for each file that the patch concerns.
    """

    version: Version
    patch_set: str
    state: State
    files: dict[str, State]


def apply(root: Path, *, patches: Path = PATCHES) -> list[str]:
    """Insert what is missing; return the files changed (none where all was in place already).

    Raises:
        PatchError: unknown version, or a place that is not as it is in that version.
        OSError: a file cannot be written; nothing has changed.
    """
    patch_set = _patch_set(root, patches)
    new: dict[Path, bytes] = {}
    for file in patch_set.files:
        source = _read(root, file)
        patched = _patched(patch_set, file, source)
        if patched != source:
            new[root / file] = patched
    write_all(new)
    return [path.relative_to(root).as_posix() for path in new]


def revert(root: Path, *, patches: Path = PATCHES) -> list[str]:
    """Take our lines out again, byte for byte; return the files changed.

    Works as well on a checkout that moved to a version which ``apply`` would refuse.

    Raises:
        PatchError: one of our lines was changed since; nothing has changed.
        OSError: a file cannot be written; nothing has changed.
    """
    version = checkout_version(root)
    sets = load_patch_sets(patches)
    fitting = [s for s in sets if s.from_version <= version < s.below_version]
    patch_set = (fitting or list(sets))[-1]
    new: dict[Path, bytes] = {}
    for file in patch_set.files:
        source = _read(root, file)
        if marked_lines(source):
            new[root / file] = without_inserts(source, patch_set.of_file(file), file)
    write_all(new)
    return [path.relative_to(root).as_posix() for path in new]


def status(root: Path, *, patches: Path = PATCHES) -> Status:
    """How the checkout stands; writes nothing.

    Raises:
        PatchError: not a checkout, or a version of Megatron that is not known.
    """
    patch_set = _patch_set(root, patches)
    files = {file: _state(root, patch_set, file) for file in patch_set.files}
    found = set(files.values())
    state: State = found.pop() if len(found) == 1 else "partly applied"
    if "changed" in files.values():
        state = "changed"
    return Status(checkout_version(root), patch_set.name, state, files)


def export(root: Path, *, patches: Path = PATCHES) -> bytes:
    """The patch for this very checkout as a unified diff for ``git apply`` or ``patch -p1``.

    Made on the fly from the user's own files; the same whether or not it is applied already.

    Raises:
        PatchError: as ``apply``.
    """
    patch_set = _patch_set(root, patches)
    return b"".join(
        _diff(file, without_inserts(source, patch_set.of_file(file), file), patched)
        for file in patch_set.files
        if (patched := _patched(patch_set, file, source := _read(root, file)))
    )


def _patch_set(root: Path, patches: Path) -> PatchSet:
    return patch_set_for(checkout_version(root), load_patch_sets(patches))


def _read(root: Path, file: str) -> bytes:
    try:
        return (root / file).read_bytes()
    except FileNotFoundError:
        raise PatchError(f"{file}: missing from this checkout; restore it") from None


def _patched(patch_set: PatchSet, file: str, source: bytes) -> bytes:
    """The file with all our lines. Refuses one in which a line of ours was changed."""
    without_inserts(source, patch_set.of_file(file), file)
    for insert in patch_set.of_file(file):
        if not is_inserted(source, insert):
            source = inserted(source, insert)
    return source


def _state(root: Path, patch_set: PatchSet, file: str) -> State:
    inserts = patch_set.of_file(file)
    try:
        source = _read(root, file)
        without_inserts(source, inserts, file)
        present = [is_inserted(source, insert) for insert in inserts]
        if not all(present):
            # What apply would say: is every place that lacks our lines as it should be?
            _patched(patch_set, file, source)
    except PatchError:
        return "changed"
    if all(present):
        return "applied"
    return "partly applied" if any(present) else "clean"


def _diff(file: str, before: bytes, after: bytes) -> bytes:
    """A unified diff. Latin-1 maps every byte to itself, so any encoding passes through."""
    header = f"diff --git a/{file} b/{file}\n"
    body = difflib.unified_diff(
        _git_lines(before), _git_lines(after), fromfile=f"a/{file}", tofile=f"b/{file}"
    )
    ended = [x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in body]
    return (header + "".join(ended)).encode("latin-1")


def _git_lines(source: bytes) -> list[str]:
    """Lines as git counts them: ended by a newline only."""
    return re.findall(r"[^\n]*\n|[^\n]+\Z", source.decode("latin-1"))
