"""Writing several files so that either all of them change or none does."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Replace each file's contents; on any failure put back those already replaced.

    New contents are first written beside the files, in full, with their modes; what can fail
    (no space, no permission) fails there, before the first file changes. Each replacement is a
    rename. A symbolic link stays a link: the file it names is replaced.

    Raises:
        OSError: nothing has changed.
    """
    targets = {Path(os.path.realpath(path)): content for path, content in contents.items()}
    former = {path: path.read_bytes() for path in targets}
    prepared: dict[Path, Path] = {}
    replaced: list[Path] = []
    try:
        for path, content in targets.items():
            prepared[path] = _write_beside(path, content)
        for path, new in prepared.items():
            os.replace(new, path)
            replaced.append(path)
    except BaseException:
        for path in reversed(replaced):
            os.replace(_write_beside(path, former[path]), path)
        raise
    finally:
        for new in prepared.values():
            with contextlib.suppress(FileNotFoundError):
                new.unlink()


def _write_beside(path: Path, content: bytes) -> Path:
    """A complete copy-to-be of ``path`` in its folder, flushed to disk, with its mode."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.optpipe-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
