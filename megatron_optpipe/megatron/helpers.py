"""Megatron's index helpers without the compile step that often cannot work."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from megatron_optpipe.megatron.replacements import Replacements

_HELPERS = "megatron.core.datasets.helpers_cpp"


def skip_helper_build(book: Replacements) -> bool:
    """Leave out the ``make`` of Megatron's index helpers where the built extension is at hand.

    Megatron runs ``make`` beside ``helpers.cpp`` at every start. The wheel brings the extension
    and no Makefile, so the run would end there, with or without a GPU; a checkout's Makefile
    builds for whatever ``python3-config`` comes first on the path. A checkout without a fitting
    extension borrows the one of the installed megatron-core. Returns whether the build is left out.
    """
    if importlib.util.find_spec("megatron") is None:
        return False
    if importlib.util.find_spec("megatron.core") is None:
        return False
    if importlib.util.find_spec(_HELPERS) is None and not _borrow_helpers(book):
        return False
    from megatron.core.datasets import utils

    book.put(utils, "compile_helpers", lambda: None)
    return True


def _borrow_helpers(book: Replacements) -> bool:
    """Import the index helpers of the installed megatron-core under the name Megatron uses."""
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    stem = _HELPERS.replace(".", "/")
    for file in files:
        if file.as_posix().startswith(stem) and file.name.endswith(suffixes):
            spec = importlib.util.spec_from_file_location(_HELPERS, Path(str(file.locate())))
            if spec is None or spec.loader is None:
                continue
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            book.put_item(sys.modules, _HELPERS, module)
            return True
    return False
