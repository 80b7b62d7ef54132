"""Real text as an indexed dataset, byte by byte."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_optpipe.megatron import dataset

DOCUMENTS = [b"first text\n", "caf\u00e9".encode(), bytes(range(256))]


def test_every_byte_comes_back_and_documents_end(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = dataset.build_dataset(DOCUMENTS, tmp_path)
    read = IndexedDataset(str(prefix))
    assert len(read) == len(DOCUMENTS)
    assert read.document_indices.tolist() == [0, 1, 2, 3]
    for tokens, document in zip(read, DOCUMENTS, strict=True):
        assert tokens[:-1].astype(np.uint8).tobytes() == document
        assert tokens[-1] == dataset.EOD


def test_the_same_text_is_built_once_and_the_same(tmp_path: Path) -> None:
    first = dataset.build_dataset(DOCUMENTS, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert dataset.build_dataset(DOCUMENTS, tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == stamps
    elsewhere = dataset.build_dataset(DOCUMENTS, tmp_path / "elsewhere")
    for suffix in (".bin", ".idx"):
        assert elsewhere.with_suffix(suffix).read_bytes() == first.with_suffix(suffix).read_bytes()


def test_other_text_or_other_borders_have_another_name(tmp_path: Path) -> None:
    names = {
        dataset.build_dataset(documents, tmp_path).name
        for documents in ([b"ab"], [b"a", b"b"], [b"ac"])
    }
    assert len(names) == 3


def test_several_may_build_at_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=dataset.build_dataset, args=(DOCUMENTS, tmp_path)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".idx"]


def test_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"):
        dataset.build_dataset([b""], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_installation_has_enough_text() -> None:
    documents = dataset.installation_text()
    assert sum(map(len, documents)) > 200_000
    assert len(documents) > 20, "the validation split goes by documents"
    assert documents == dataset.installation_text()


def test_the_command_prints_the_prefix_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"hello")
    assert dataset.main(["--output", str(tmp_path / "out"), str(text)]) == 0
    prefix = Path(capsys.readouterr().out.strip())
    assert prefix.with_suffix(".bin").stat().st_size == 2 * (5 + 1)
    assert dataset.main(["--output", str(tmp_path), str(tmp_path / "missing")]) == 2
    error = capsys.readouterr().err
    assert "missing" in error
    assert error.count("\n") == 1
