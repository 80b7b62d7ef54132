"""A small model cut into stages, with B and W apart, and what plain autograd makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_optpipe.core import Op, Problem
from megatron_optpipe.runtime.store import ActivationStore

WIDTH = 48
ROWS = 16


def make_stages(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        for _ in range(num_stages)
    ]


def make_inputs(num_microbatches: int) -> list[Tensor]:
    torch.manual_seed(8)
    return [torch.randn(ROWS, WIDTH) for _ in range(num_microbatches)]


class ToyHandlers:
    """The stages of one device; W computes from the graph that B kept."""

    def __init__(
        self,
        problem: Problem,
        stages: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        store: ActivationStore | None,
    ) -> None:
        self.last = problem.num_stages - 1
        self.stages = stages
        self.inputs = inputs
        self.store = store
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self.losses: dict[int, float] = {}

    def forward(self, op: Op, received: Tensor | None) -> Tensor | None:
        x = self.inputs[op.microbatch].clone() if received is None else received
        x.requires_grad_()
        y = self.stages[op.stage](x)
        if op.stage == self.last:
            y = y.square().mean()
            self.losses[op.microbatch] = y.item()
        self.graphs[op.stage, op.microbatch] = (x, y, None)
        return None if op.stage == self.last else y

    def backward_input(self, op: Op, received: Tensor | None) -> Tensor | None:
        x, y, _ = self.graphs[op.stage, op.microbatch]
        self.graphs[op.stage, op.microbatch] = (x, y, received)
        (grad,) = torch.autograd.grad(y, [x], received, retain_graph=True)
        return None if op.stage == 0 else grad

    def backward_weight(self, op: Op) -> None:
        _, y, received = self.graphs.pop((op.stage, op.microbatch))
        parameters = list(self.stages[op.stage].parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(y, parameters, received)):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def reference(problem: Problem) -> tuple[dict[int, float], list[Tensor]]:
    """Losses and gradients without executor, store or threads: one microbatch after the other."""
    stages, inputs = make_stages(problem.num_stages), make_inputs(problem.num_microbatches)
    toy = ToyHandlers(problem, stages, inputs, None)
    for j in range(problem.num_microbatches):
        tensor: Tensor | None = None
        for s in range(problem.num_stages):
            output = toy.forward(Op("F", s, j), tensor)
            tensor = None if output is None else output.detach()
        for s in reversed(range(problem.num_stages)):
            tensor = toy.backward_input(Op("B", s, j), tensor)
            toy.backward_weight(Op("W", s, j))
    parameters = [p for stage in stages for p in stage.parameters()]
    return toy.losses, [p.grad for p in parameters if p.grad is not None]
