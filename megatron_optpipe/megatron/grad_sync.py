"""When gradients may be reduced over data parallel ranks: after the last W of each parameter.

Megatron turns the reduction off with ``config.no_sync_func`` and on again for the last
microbatch. Here the last microbatch ends twice, in B (norms, biases, embeddings) and in W (the
split linears), and model chunks end in whatever order the plan says; so each chunk has its own
switch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["GradSync"]

NoSync = Callable[[], AbstractContextManager[Any]]


class GradSync:
    """The switches of one iteration, one a model chunk. Off until ``last_backward``.

    Args:
        no_sync: ``config.no_sync_func``: none, one for all chunks, or one a chunk.
        grad_sync: ``config.grad_sync_func`` (set by ``--align-grad-reduce``): where given, the
            reduction of a chunk is started by calling it, once, and never by the hooks of B or W.
        model: the chunks of this rank.
    """

    def __init__(
        self,
        no_sync: NoSync | Sequence[NoSync] | None,
        grad_sync: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
        model: Sequence[torch.nn.Module],
    ) -> None:
        self._model = model
        if callable(no_sync):
            # One function for several chunks cannot be on for one and off for another: the
            # reductions then start together, at the end.
            self._no_sync: list[NoSync] = [no_sync]
        else:
            self._no_sync = list(no_sync or ())
        self._one_a_chunk = len(self._no_sync) == len(model)
        self._start: list[Callable[..., Any]] | None = None
        if callable(grad_sync):
            self._start = [grad_sync] * len(model)
        elif grad_sync is not None:
            self._start = list(grad_sync)
        self._open: dict[int, AbstractContextManager[Any]] = {}
        self._started: set[int] = set()

    def begin(self) -> None:
        """Turn the reduction off for every chunk."""
        for index in range(len(self._no_sync)):
            self._off(index)

    @contextlib.contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Around B, and again around W, of the last microbatch of ``chunk``: on."""
        if self._start is not None or not self._one_a_chunk:
            yield
            return
        self._on(chunk)
        try:
            yield
        finally:
            self._off(chunk)

    def chunk_done(self, chunk: int) -> None:
        """After the last W of ``chunk``: start its reduction where Megatron aligns them."""
        if self._start is not None and self._one_a_chunk:
            self._launch(chunk)

    def end(self) -> None:
        """Turn the reduction on again for every chunk, and start what was not started."""
        for index in list(self._open):
            self._on(index)
        if self._start is not None:
            for chunk in range(len(self._model)):
                if chunk not in self._started:
                    self._launch(chunk)

    def abandon(self) -> None:
        """Leave the switches as they were found, after a fault."""
        for index in list(self._open):
            self._on(index)

    def _launch(self, chunk: int) -> None:
        assert self._start is not None
        if chunk in self._open:
            self._on(chunk)
        self._start[chunk](self._model[chunk].parameters())
        self._started.add(chunk)

    def _off(self, index: int) -> None:
        context = self._no_sync[index]()
        context.__enter__()
        self._open[index] = context

    def _on(self, index: int) -> None:
        self._open.pop(index).__exit__(None, None, None)
