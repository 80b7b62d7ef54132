"""Real text that every Python installation has, as Megatron's indexed dataset, byte by byte.

The text is the language reference that ``help()`` shows (``pydoc_data.topics``): about half a
megabyte of English with code in it. A token is a byte; one more token ends a document.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

#: Token that ends a document: the one after the 256 bytes.
EOD = 256
#: ``NullTokenizer`` with this ``--vocab-size`` takes its last id, which is ``EOD``, for that.
VOCAB_SIZE = EOD + 1

#: Megatron's flags for a dataset made here.
TOKENIZER_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE))


def installation_text() -> list[bytes]:
    """The documents: each topic of Python's language reference, in the order of its name.

    An installation without ``pydoc_data`` (some minimal packages) gives the sources of its
    standard library instead.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        folder = Path(os.__file__).parent
        return [file.read_bytes() for file in sorted(folder.glob("*.py"))]
    return [topics[name].encode("utf-8") for name in sorted(topics)]


def read_files(paths: Iterable[Path]) -> list[bytes]:
    """The bytes of each file, one document each.

    Raises:
        OSError: a file cannot be read.
    """
    return [path.read_bytes() for path in paths]


def build_dataset(documents: list[bytes], folder: Path) -> Path:
    """Write ``documents`` as an indexed dataset into ``folder``; return its path prefix.

    ``prefix + ".bin"`` holds the tokens (16 bits each), ``prefix + ".idx"`` the index. The name
    bears a digest of the text: the same text is built once. Both files appear whole or not at
    all, so several processes and threads may build at the same time.

    Raises:
        ValueError: there is no text.
    """
    documents = [document for document in documents if document]
    if not documents:
        raise ValueError("no text: every document is empty")
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "big") + document)
    prefix = folder / f"bytes-{digest.hexdigest()[:16]}"
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    if data.is_file() and index.is_file():
        return prefix
    folder.mkdir(parents=True, exist_ok=True)
    _write(documents, data, index)
    return prefix


def _write(documents: list[bytes], data: Path, index: Path) -> None:
    # Imported here: a dataset that exists already is found without torch and Megatron.
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    # A folder of our own: another process, or another thread of this one, may build the same.
    with tempfile.TemporaryDirectory(prefix=f".{data.stem}.", dir=data.parent) as folder:
        unfinished = [Path(folder, path.name) for path in (data, index)]
        builder = IndexedDatasetBuilder(str(unfinished[0]), dtype=np.uint16)
        for document in documents:
            tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.int32), EOD)
            builder.add_item(torch.from_numpy(tokens))
            builder.end_document()
        builder.finalize(str(unfinished[1]))
        # The index last: who finds it finds the data.
        for path, final in zip(unfinished, (data, index), strict=True):
            os.replace(path, final)


def main(argv: list[str] | None = None) -> int:
    """``python -m megatron_optpipe.megatron.dataset --output DIR [FILE...]``: print the prefix."""
    parser = argparse.ArgumentParser(prog="megatron_optpipe.megatron.dataset", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="your own text instead")
    args = parser.parse_args(argv)
    try:
        documents = read_files(args.files) if args.files else installation_text()
        print(build_dataset(documents, args.output))
    except (OSError, ValueError) as error:
        print(f"dataset: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
