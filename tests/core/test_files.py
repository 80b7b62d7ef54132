"""A file is written whole or not at all, and a failure says which file it was."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_optpipe.core.files import write_atomically


def test_the_last_text_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("one", "two"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_text_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, "new")
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_an_open_file_by_its_device_name_is_written_to_not_replaced(tmp_path: Path) -> None:
    code = (
        "from megatron_optpipe.core.files import write_atomically;"
        "write_atomically('/dev/stdout', 'text')"
    )
    with (tmp_path / "out").open("w+") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=tmp_path)
        out.seek(0)
        assert out.read() == "text"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
