"""Checks of the B/W split on real Megatron linears, run as a process of its own by test_wgrad.

A net that uses each of its two linears twice, wrapped in Megatron's data parallel class, on one
process. Prints one line of JSON: the name of each check and what it saw.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from megatron_optpipe.megatron.cpu import install

install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.distributed.param_and_grad_buffer import (  # noqa: E402
    _ParamAndGradBucketGroup as BucketGroup,
)
from megatron.core.tensor_parallel import layers, random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from megatron_optpipe.megatron import wgrad  # noqa: E402
from megatron_optpipe.megatron.wgrad import WeightGradSplit  # noqa: E402

NUM_MICROBATCHES = 4


class Fused:
    """Stands in for Apex's kernels: adds the weight gradient to ``main_grad`` and counts."""

    calls = 0

    @classmethod
    def wgrad_gemm_accum_fp32(
        cls, total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        cls.calls += 1
        main_grad.add_(grad_output.t().matmul(total_input))


class Net(torch.nn.Module):
    """in 8 -> 16 -> 8 -> 16 -> 8 with the same two linears twice, and a norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        init = torch.nn.init.normal_
        self.up = layers.ColumnParallelLinear(8, 16, config=config, init_method=init, bias=True)
        self.down = layers.RowParallelLinear(
            16, 8, config=config, init_method=init, bias=True, input_is_parallel=True,
            skip_bias_add=False,
        )  # fmt: skip
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for _ in range(2):
            y = torch.tanh(self.down(torch.tanh(self.up(y)[0]))[0])
        return y + x


def gradients(
    net: DistributedDataParallel, batches: list[torch.Tensor], run: Callable[[Any], None]
) -> list[torch.Tensor]:
    net.zero_grad_buffer()
    run([x.clone().requires_grad_() for x in batches])
    net.finish_grad_sync()
    return [p.main_grad.clone() for p in net.parameters()]


@contextlib.contextmanager
def last(net: DistributedDataParallel, is_last: bool, overlap: bool) -> Iterator[None]:
    """Megatron's switch: reductions may start in the last microbatch only."""
    with contextlib.nullcontext() if is_last or not overlap else net.no_sync():
        yield


def check(overlap: bool, fused: bool) -> dict[str, Any]:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, gradient_accumulation_fusion=fused
    )
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=100)
    net = DistributedDataParallel(config, ddp, Net(config))
    batches = [torch.randn(3, 2, 8) for _ in range(NUM_MICROBATCHES)]
    split = WeightGradSplit()
    log: list[str] = []
    start = BucketGroup.start_grad_sync

    def spied(self: Any, *positional: Any, **named: Any) -> Any:
        log.append("reduce")
        return start(self, *positional, **named)

    def stock(inputs: list[torch.Tensor]) -> None:
        for j, x in enumerate(inputs):
            with last(net, j == NUM_MICROBATCHES - 1, overlap):
                net(x).sin().sum().backward()

    def apart(inputs: list[torch.Tensor]) -> None:
        """Every B first, then every W."""
        for j, x in enumerate(inputs):
            with split.splitting(0, j):
                output = net(x).sin().sum()
            with last(net, j == NUM_MICROBATCHES - 1, overlap):
                output.backward()
            assert len(split.held(0, j)) == 8, "two linears, twice, two tensors each"
        log.append("W")
        for j in range(NUM_MICROBATCHES):
            with last(net, j == NUM_MICROBATCHES - 1, overlap):
                split.run(0, j)
            assert split.held(0, j) == []

    def never(inputs: list[torch.Tensor]) -> None:
        """B only: what must not be in the weights yet."""
        for j, x in enumerate(inputs):
            with split.splitting(0, j):
                output = net(x).sin().sum()
            with last(net, False, overlap):
                output.backward()

    function = getattr(layers, "LinearWithGradAccumulationAndAsyncCommunication")  # noqa: B009
    expected = [gradients(net, batches, stock) for _ in range(2)][-1]
    BucketGroup.start_grad_sync = spied
    seen = gradients(net, batches, apart)
    BucketGroup.start_grad_sync = start
    reductions = list(log)
    net.zero_grad_buffer()
    never([x.clone().requires_grad_() for x in batches])
    only_b = [p.main_grad.clone() for p in net.parameters()]
    split.clear()
    weights = [p.dim() == 2 for p in net.parameters()]
    return {
        "same": all(torch.equal(a, b) for a, b in zip(expected, seen)),
        "weights_untouched_by_b": all(not g.any() for g, w in zip(only_b, weights) if w),
        "biases_done_by_b": all(
            torch.equal(g, e) for g, e, w in zip(only_b, expected, weights) if not w
        ),
        "reductions_before_w": reductions[: reductions.index("W")].count("reduce"),
        "reductions": reductions.count("reduce"),
        "bucket_groups": len(net.bucket_groups),
        "stock_function_back": function is layers.LinearWithGradAccumulationAndAsyncCommunication,
    }


def one_at_a_time() -> dict[str, Any]:
    """How many weight gradients W keeps alive, and whether autograd copies them."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    chain = [
        layers.ColumnParallelLinear(8, 8, config=config, init_method=torch.nn.init.normal_)
        for _ in range(5)
    ]
    made: list[StorageWeakRef] = []
    alive: list[int] = []
    kept: list[bool] = []
    compute = wgrad._weight_gradient

    def watched(pending: Any) -> torch.Tensor | None:
        gradient = compute(pending)
        assert gradient is not None
        made.append(StorageWeakRef(gradient.untyped_storage()))
        return gradient

    def hook(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        alive.append(sum(not ref.expired() for ref in made))
        kept.append(made[-1].cdata == weight.grad.untyped_storage()._weak_ref())
        weight.grad = None

    for linear in chain:
        linear.weight.register_post_accumulate_grad_hook(hook)
    split = WeightGradSplit()
    x = torch.randn(3, 2, 8, requires_grad=True)
    with split.splitting(0, 0):
        for linear in chain:
            x = linear(x)[0]
    x.sum().backward()
    wgrad._weight_gradient = watched
    try:
        split.run(0, 0)
    finally:
        wgrad._weight_gradient = compute
    return {"alive": alive, "kept": kept}


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(1)
    report = {
        "plain": check(overlap=False, fused=False),
        "overlap": check(overlap=True, fused=False),
    }
    memory = one_at_a_time()
    layers.fused_weight_gradient_mlp_cuda = Fused
    layers._grad_accum_fusion_available = True
    report["fused"] = check(overlap=False, fused=True)
    report["fused overlap"] = check(overlap=True, fused=True)
    report["fused"]["kernel_calls"] = Fused.calls
    print("MEMORY " + json.dumps(memory))
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
