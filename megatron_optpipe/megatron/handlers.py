"""What F, B and W are in Megatron: its own forward and backward step, and our W.

The executor calls these in the order of the plan. They keep what autograd needs between F and B
of one (stage, microbatch): the input, whose gradient goes to the previous stage, and the output,
where the graph begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_optpipe.core.op import Op
from megatron_optpipe.core.program import Compute, Program
from megatron_optpipe.megatron.grad_sync import GradSync
from megatron_optpipe.megatron.wgrad import WeightGradSplit
from megatron_optpipe.runtime.store import ActivationStore

__all__ = ["ChunkMap", "Iteration", "StageHandlers", "adjacent_pairs"]

Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Which model chunk of this rank a stage is."""

    stages: tuple[int, ...]
    """Stages of this rank in model order; chunk ``c`` is ``stages[c]``."""
    num_stages: int

    def chunk(self, stage: int) -> int:
        return self.stages.index(stage)

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1


@dataclass(slots=True)
class Iteration:
    """The arguments of one call of Megatron's forward-backward function, and what it collects."""

    forward_step_func: Callable[..., Any]
    data_iterator: Sequence[Any]
    """One a chunk."""
    model: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    cp_size: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    sync: GradSync | None = None
    losses: list[Any] = field(default_factory=list)
    """What the loss function reports, in microbatch order (last stage only)."""
    num_tokens: Tensor | None = None
    """Tokens that the loss counted, int32 on this rank's device whatever the loss gives: all
    ranks of the pipeline reduce it."""


class StageHandlers:
    """The executor's handlers for the chunks of one rank.

    Args:
        chunks: which stages this rank owns.
        split: the queues between B and W.
        store: told what W keeps in memory after B, so that it is counted.
        fused: (stage, microbatch) whose W directly follows its B: one backward of Megatron's.
    """

    def __init__(
        self,
        chunks: ChunkMap,
        split: WeightGradSplit,
        store: ActivationStore,
        fused: frozenset[Key] = frozenset(),
    ) -> None:
        self._chunks = chunks
        self._split = split
        self._store = store
        self._fused = fused
        self._batches: list[_Batches | None] = []
        self._graphs: dict[Key, tuple[Tensor | None, Tensor]] = {}
        self._iteration: Iteration | None = None

    def begin(self, iteration: Iteration) -> None:
        """Take the arguments of the next run."""
        self._iteration = iteration
        iteration.num_tokens = torch.zeros([], dtype=torch.int, device=self._store.device)
        self._batches = [
            None if source is None else _Batches(source, self._store)
            for source in iteration.data_iterator
        ]
        self._graphs.clear()
        self._split.clear()

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        """F: ``received`` [seq / tp, batch, hidden] of the previous stage -> the same, or None."""
        now = self._now()
        chunk, last = self._chunks.chunk(op.stage), self._chunks.is_last(op.stage)
        self._gather_parameters(now, chunk, op.microbatch)
        if received is not None:
            received.requires_grad_()
        first = op.microbatch == 0
        with self._splitting(op):
            output, num_tokens = schedules.forward_step(
                now.forward_step_func,
                self._batches[chunk],
                now.model[chunk],
                now.num_microbatches,
                received,
                now.losses,
                now.config,
                now.cp_size,
                collect_non_loss_data=now.collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    now.first_val_step, now.forward_only, first
                ),
                current_microbatch=op.microbatch,
                vp_stage=chunk if len(self._chunks.stages) > 1 else None,
                is_last_stage=last,
            )
        assert now.num_tokens is not None
        now.num_tokens += num_tokens
        if now.forward_only:
            return None if last else output
        self._graphs[op.stage, op.microbatch] = (received, output)
        # The message is a tensor of its own: Megatron frees the output's data by pointing it
        # elsewhere, and a send may still be reading it.
        message = None if last else output.detach()
        schedules.deallocate_output_tensor(output, now.config.deallocate_pipeline_outputs)
        if received is not None:
            _let_go_of_data(received)
        return message

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        """B: gradient of the output (None on the last stage) -> gradient of the input."""
        now = self._now()
        input_, output = self._graphs.pop((op.stage, op.microbatch))
        with self._splitting(op), self._last_backward(now, op):
            gradient: Tensor | None = schedules.backward_step(input_, output, received, now.config)
        if (op.stage, op.microbatch) in self._fused:
            self._chunk_done(now, op)
        # Counted from the end of B on, when the store takes its next sample.
        self._store.ledger.add_tensors(self._split.held(op.stage, op.microbatch))
        return gradient

    def backward_weight(self, op: Op) -> None:
        """W: the weight gradients that B left to do."""
        now = self._now()
        if (op.stage, op.microbatch) in self._fused:
            return
        with self._last_backward(now, op):
            self._split.run(op.stage, op.microbatch)
        self._chunk_done(now, op)

    def _now(self) -> Iteration:
        assert self._iteration is not None, "begin was not called"
        return self._iteration

    @contextlib.contextmanager
    def _splitting(self, op: Op) -> Iterator[None]:
        if self._now().forward_only or (op.stage, op.microbatch) in self._fused:
            yield
        else:
            with self._split.splitting(op.stage, op.microbatch):
                yield

    def _last_backward(self, now: Iteration, op: Op) -> AbstractContextManager[None]:
        if now.sync is None or op.microbatch < now.num_microbatches - 1:
            return contextlib.nullcontext()
        return now.sync.last_backward(self._chunks.chunk(op.stage))

    def _chunk_done(self, now: Iteration, op: Op) -> None:
        if now.sync is not None and op.microbatch == now.num_microbatches - 1:
            now.sync.chunk_done(self._chunks.chunk(op.stage))

    def _gather_parameters(self, now: Iteration, chunk: int, microbatch: int) -> None:
        """``--align-param-gather``: start the all-gather of the chunk after this one."""
        gather = now.config.param_sync_func
        if gather is None or now.forward_only or microbatch > 0 or len(now.model) < 2:
            return
        wanted = [0, 1] if chunk == 0 else [chunk + 1]
        for index in wanted:
            if index < len(now.model):
                function = gather[index] if isinstance(gather, Sequence) else gather
                function(now.model[index].parameters())


class _Batches:
    """A data iterator whose batches are known to the store as somebody else's.

    Megatron's rerun machine keeps the batches of an iteration to its end: they are no activations,
    B and W do not free them.
    """

    def __init__(self, source: Iterator[Any], store: ActivationStore) -> None:
        self._source, self._store = source, store

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        values = batch.values() if isinstance(batch, Mapping) else (batch,)
        self._store.keep_out(value for value in values if isinstance(value, Tensor))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def adjacent_pairs(program: Program) -> frozenset[Key]:
    """(stage, microbatch) of every B that its own W follows at once on this device."""
    compute = [item.op for item in program.items if isinstance(item, Compute)]
    return frozenset(
        (op.stage, op.microbatch)
        for op, after in zip(compute, compute[1:])
        if op.kind == "B" and after == Op("W", op.stage, op.microbatch)
    )


def _let_go_of_data(received: Tensor) -> None:
    """Keep the input as a leaf (its gradient is wanted) without holding its memory.

    Autograd keeps what it needs of it through the activation store. The stand-in has the same
    shape, so that the gradient is still checked against it.
    """
    stand_in = torch.empty(1, dtype=received.dtype, device=received.device)
    received.data = stand_in.expand(received.shape)
