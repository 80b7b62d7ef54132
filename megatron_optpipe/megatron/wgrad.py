"""The B/W split of Megatron's local linear layers (megatron-core 0.19).

While a forward of (stage, microbatch) runs inside ``WeightGradSplit.splitting``, every
``ColumnParallelLinear`` and ``RowParallelLinear`` uses ``SplitLinear`` below instead of Megatron's
own autograd function. In backward it computes the gradient of its input and of its bias, and
queues (weight, input, gradient of the output). ``WeightGradSplit.run`` is W: it computes the weight
gradients with the kernels that Megatron uses, in the order in which its backward would have met
them, and hands them to autograd, so that Megatron's own hooks (``main_grad`` accumulation,
``--overlap-grad-reduce``) fire once a weight and microbatch, after W.

Outside ``splitting`` Megatron's symbols are the stock objects. Everything that is not such a
linear (norms, biases, embeddings, attention) keeps its gradients in B.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_attr_wrapped_model, prepare_input_tensors_for_wgrad_compute
from torch import Tensor

__all__ = ["SplitLinear", "WeightGradSplit", "weights_used_twice"]

STOCK_NAME = "LinearWithGradAccumulationAndAsyncCommunication"
"""The autograd function of Megatron that ``splitting`` stands in for."""

Key = tuple[int, int]
"""(stage, microbatch)."""


class LinearCall(NamedTuple):
    """Megatron's arguments of one linear, after input and bias.

    The weight is in here, out of autograd's sight: its accumulator (and with it the hooks of data
    parallelism) must not be touched in B, which autograd does even for a gradient of None.
    """

    weight: torch.nn.Parameter
    gradient_accumulation_fusion: bool
    allreduce_dgrad: bool
    sequence_parallel: bool
    grad_output_buffer: list[Tensor] | None
    wgrad_deferral_limit: int | None
    tp_group: Any
    gtp_remat_size: int


@dataclass(slots=True)
class Pending:
    """One weight gradient that B left to W. Shapes: input [..., in], grad_output [rows, out]."""

    input: Tensor
    grad_output: Tensor
    call: LinearCall
    main_grad: Tensor | None


class SplitLinear(torch.autograd.Function):
    """Megatron's linear with the weight gradient left to W."""

    @staticmethod
    @layers.custom_fwd
    def forward(
        ctx: Any,
        input_: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        queue: list[Pending],
    ) -> Tensor:
        """input [..., in] x weight [out, in] -> [..., out], as stock."""
        ctx.save_for_backward(input_)
        weight = call.weight
        ctx.call, ctx.queue, ctx.use_bias = call, queue, bias is not None
        fused = call.gradient_accumulation_fusion
        ctx.main_grad = getattr(weight, "main_grad", None) if fused else None
        total_input = _gathered(input_, call) if call.sequence_parallel else input_
        output = torch.matmul(total_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and bias; the weight's is queued."""
        (input_,) = ctx.saved_tensors
        call: LinearCall = ctx.call
        grad_input = grad_output.matmul(call.weight)
        handle, full = None, grad_input
        if call.allreduce_dgrad:
            handle = torch.distributed.all_reduce(grad_input, group=call.tp_group, async_op=True)
        elif call.sequence_parallel:
            shard = torch.empty_like(input_, requires_grad=False)
            handle = torch.distributed.reduce_scatter_tensor(
                shard, grad_input, group=call.tp_group, async_op=True
            )
            grad_input = shard
        rows = grad_output.contiguous().view(-1, grad_output.shape[-1])
        ctx.queue.append(Pending(input_, rows, call, ctx.main_grad))
        grad_bias = rows.sum(dim=0) if ctx.use_bias else None
        if handle is not None:
            handle.wait()
        del full  # the source of the reduction had to live until here
        return grad_input, grad_bias, None, None


class WeightGradSplit:
    """Queues of weight gradients, one for each (stage, microbatch) between its B and its W.

    Args:
        unsplit: weights whose gradient stays in B (see ``weights_used_twice``).
    """

    def __init__(self, unsplit: Iterable[torch.nn.Parameter] = ()) -> None:
        self._unsplit = {id(weight) for weight in unsplit}
        self._queues: dict[Key, list[Pending]] = {}

    @contextlib.contextmanager
    def splitting(self, stage: int, microbatch: int) -> Iterator[None]:
        """Within this context Megatron's local linears leave their weight gradients to W.

        Wrap F in it, and B too: with recomputation the forward runs again inside B.
        """
        queue = self._queues.setdefault((stage, microbatch), [])
        stock = getattr(layers, STOCK_NAME)
        setattr(layers, STOCK_NAME, _Applier(stock, queue, self._unsplit))
        try:
            yield
        finally:
            setattr(layers, STOCK_NAME, stock)

    def held(self, stage: int, microbatch: int) -> list[Tensor]:
        """The tensors that W of (stage, microbatch) needs; they stay in memory until then."""
        return [
            tensor
            for pending in self._queues.get((stage, microbatch), ())
            for tensor in (pending.input, pending.grad_output)
        ]

    def run(self, stage: int, microbatch: int) -> None:
        """W: compute the queued weight gradients and fire the hooks of each weight once.

        One weight after the other, so that only one gradient is alive at a time, as in Megatron's
        own backward.
        """
        queue = self._queues.pop((stage, microbatch), [])
        uses = Counter(id(pending.call.weight) for pending in queue)
        earlier: dict[int, Tensor] = {}
        # Each entry is let go as soon as it is used: W frees memory while it runs.
        queue.reverse()
        while queue:
            pending = queue.pop()
            weight = pending.call.weight
            key = id(weight)
            with torch.no_grad():
                gradient = _weight_gradient(pending)
                # A weight used twice in one graph: autograd too sums in the order it meets them.
                if gradient is not None and key in earlier:
                    gradient = earlier.pop(key) + gradient
            del pending
            uses[key] -= 1
            if gradient is None:
                gradient = earlier.pop(key, None)
            holder = [] if gradient is None else [gradient]
            del gradient
            if holder and uses[key]:
                earlier[key] = holder.pop()
            elif holder:
                _hand_over(weight, holder)

    def clear(self) -> None:
        """Forget everything that is queued (after a fault)."""
        self._queues.clear()


def weights_used_twice(model: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Word embeddings that also are the output layer's weight within one model chunk.

    There autograd adds the two gradients before it accumulates them; split in two, the sum would
    be rounded otherwise. Such a weight keeps its gradient in B. (On another chunk than the
    embedding, the output layer has a copy of its own and is split like any linear.)
    """
    shared = []
    for chunk in model:
        try:
            inner = get_attr_wrapped_model(chunk, "share_embeddings_and_output_weights", True, True)
        except RuntimeError:  # not a language model
            continue
        if (
            inner.share_embeddings_and_output_weights
            and getattr(inner, "pre_process", False)
            and getattr(inner, "post_process", False)
        ):
            shared.append(inner.shared_embedding_or_output_weight())
    return shared


class _Applier:
    """What ``splitting`` puts in place of Megatron's autograd function: only ``apply`` is used."""

    def __init__(self, stock: Any, queue: list[Pending], unsplit: set[int]) -> None:
        self._stock, self._queue, self._unsplit = stock, queue, unsplit

    def apply(self, input_: Tensor, weight: Any, bias: Tensor | None, *rest: Any) -> Tensor:
        call = LinearCall(weight, *rest)
        stays_in_b = (
            not torch.is_grad_enabled()  # the first pass of a recomputed layer
            or not input_.requires_grad  # nothing would call our backward
            or id(weight) in self._unsplit
            or not isinstance(weight, torch.nn.Parameter)
            or call.gtp_remat_size > 1
            or call.grad_output_buffer is not None
            or hasattr(weight, "__fsdp_param__")
        )
        if stays_in_b:
            return self._stock.apply(input_, weight, bias, *rest)
        return SplitLinear.apply(input_, bias, call, self._queue)


class _Given(torch.autograd.Function):
    """The root of a backward that does nothing but give a weight its gradient.

    The gradient leaves the holder with it, so nobody else holds it and autograd keeps it as it is;
    given as the gradient of a leaf it would be copied.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.nn.Parameter, holder: list[Tensor]) -> Tensor:
        ctx.holder = holder
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.holder.pop(), None


def _hand_over(weight: torch.nn.Parameter, holder: list[Tensor]) -> None:
    """Accumulate the gradient in ``holder``, which is emptied, and fire the weight's hooks."""
    with torch.enable_grad():
        root = _Given.apply(weight, holder)
    torch.autograd.backward(root)


def _gathered(input_: Tensor, call: LinearCall) -> Tensor:
    """The whole input from the shards of sequence parallelism: [seq / tp, ...] -> [seq, ...]."""
    shape = list(input_.size())
    shape[0] *= call.tp_group.size()
    buffer = get_global_memory_buffer().get_tensor(shape, input_.dtype, "mpu")
    torch.distributed.all_gather_into_tensor(buffer, input_, group=call.tp_group)
    return buffer


def _weight_gradient(pending: Pending) -> Tensor | None:
    """The gradient of one weight [out, in], or a placeholder where a fused kernel added it."""
    call, weight = pending.call, pending.call.weight
    total_input = _gathered(pending.input, call) if call.sequence_parallel else pending.input
    total_input = total_input.contiguous().view(-1, total_input.shape[-1])
    grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
        pending.grad_output, total_input
    )
    if not call.gradient_accumulation_fusion:
        return grad_output.t().matmul(total_input)
    main_grad = pending.main_grad
    assert main_grad is not None, "gradient accumulation fusion needs Megatron's main_grad"
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
    else:
        raise RuntimeError(f"main_grad is {main_grad.dtype}, must be fp32, fp16 or bf16")
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # The hooks fire for a gradient only; its values are not read unless zero_out_wgrad says so.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(main_grad.shape, dtype=pending.input.dtype, device=pending.input.device)
