"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file beside its place, then rename it into place; through a symbolic link.

    Text is written as UTF-8.
    What is no regular file (``/dev/null``, a pipe) is written to as it is, never replaced, and so
    is an open file by its name under ``/dev`` (``/dev/stdout``).

    Raises:
        OSError: with the name of the file, which a failed write alone does not have.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(path).resolve()
    try:
        device = Path(path).absolute().is_relative_to("/dev")
        if device or (target.exists() and not target.is_file()):
            Path(path).write_bytes(data)
        else:
            _replace(target, data)
    except OSError as failure:
        raise OSError(failure.errno, failure.strerror, str(path)) from failure


def _replace(target: Path, data: bytes) -> None:
    # Not the process's number: threads share it, and so may ranks on two nodes of one file system.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
