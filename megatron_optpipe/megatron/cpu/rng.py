"""Random numbers: the CPU's default generator is the "CUDA generator" as well."""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_optpipe.megatron.replacements import Replacements

#: Megatron's tracker warns on every fork that the CPU generator moved inside a GPU context. Here
#: the two are one generator, so that is no news.
_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_TRACKER_WARNING = "CPU RNG state changed"


def _is_news(record: logging.LogRecord) -> bool:
    return _TRACKER_WARNING not in record.getMessage()


def stand_in_rng(book: Replacements) -> None:
    """Send seeds and states of ``torch.cuda`` to the CPU's default generator."""
    generator = torch.default_generator

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        book.put(module, "get_rng_state", get_rng_state)
        book.put(module, "set_rng_state", set_rng_state)
        book.put(module, "manual_seed", manual_seed)
        # torch.manual_seed calls this one and then seeds the CPU itself: twice the same seed.
        book.put(module, "manual_seed_all", manual_seed)
    book.put(torch.cuda, "default_generators", (generator,))
    # Megatron's own tracker goes through these two to reach the generators.
    book.put(torch.cuda, "_lazy_init", lambda: None)
    book.put(torch.cuda, "_lazy_call", lambda function, **_kwargs: function())
    logging.getLogger(_TRACKER_LOGGER).addFilter(_is_news)
