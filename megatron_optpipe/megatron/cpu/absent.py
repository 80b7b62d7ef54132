"""Packages that a CPU has no use for."""

from __future__ import annotations

import sys

from megatron_optpipe.megatron.replacements import Replacements

#: With one of these importable Megatron calls CUDA kernels even under ``--transformer-impl local``.
GPU_ONLY = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")


def hide_gpu_packages(book: Replacements) -> None:
    """Make an import of each GPU-only package fail with ``ModuleNotFoundError``.

    That is what an entry ``None`` in ``sys.modules`` does, and what Megatron's guards catch. A
    package that is already imported stays.
    """
    for name in GPU_ONLY:
        if name not in sys.modules:
            book.put_item(sys.modules, name, None)
