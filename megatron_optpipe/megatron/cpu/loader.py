"""Data loaders: a generator of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron_optpipe.megatron.replacements import Replacements


def stand_in_loader(book: Replacements) -> None:
    """Keep the loader's seed out of the default generator.

    Each new iterator of a ``DataLoader`` draws a base seed from the CPU's default generator. On a
    GPU machine nobody notices; here dropout draws from the same generator, and a resumed run would
    leave the path of the unbroken one.
    """
    true_init = DataLoader.__init__

    @functools.wraps(true_init)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        true_init(loader, *args, **kwargs)

    book.put(DataLoader, "__init__", init)
