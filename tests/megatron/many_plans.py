"""Run one Megatron job many times in one process group: stock, then under one plan after another.

Started under the CPU stand-in by ``jobs.many``. Megatron's own ``pretrain`` sets everything up
and its own ``train_step`` and ``evaluate`` run; only its outer loop is replaced, by one that puts
model, optimizer, random numbers and data back to the same start before each run. Each rank writes
what it saw, every digit of it, to ``OUT/rank{r}.json``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import get_args, get_timers, training

EVALUATE_AFTER = 5


class Job:
    """Everything that a run changes, and how to put it back."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, config: Any) -> None:
        self.model, self.optimizer, self.scheduler, self.config = (
            model,
            optimizer,
            scheduler,
            config,
        )
        self._params = [p.detach().clone() for p in self.parameters()]
        self._rng = torch.get_rng_state(), copy.deepcopy(get_cuda_rng_tracker().get_states())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.model:
            yield from chunk.parameters()

    def reset(self) -> None:
        with torch.no_grad():
            for parameter, start in zip(self.parameters(), self._params):
                parameter.copy_(start)
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner.optimizer.state.clear()
            inner.reload_model_params()
        self.scheduler.num_steps = 0
        self.scheduler.step(0)
        torch.set_rng_state(self._rng[0])
        get_cuda_rng_tracker().set_states(copy.deepcopy(self._rng[1]))

    def digest(self) -> str:
        whole = hashlib.sha256()
        for parameter in self.parameters():
            whole.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()


class Tape:
    """The batches of one data iterator, played again for every run."""

    def __init__(self, source: Any) -> None:
        self._source, self._batches = source, []

    def play(self) -> Iterator[Any]:
        position = 0
        while True:
            if position == len(self._batches):
                self._batches.append(next(self._source))
            yield copy.copy(self._batches[position])
            position += 1


def one_run(
    job: Job, tapes: dict[str, list[Tape | None]], function: Any, step: Any
) -> dict[str, Any]:
    """``args.train_iters`` iterations with one evaluation in between; all numbers of it."""
    args = get_args()
    job.reset()
    data = {
        kind: [None if tape is None else RerunDataIterator(tape.play()) for tape in chunks]
        for kind, chunks in tapes.items()
    }
    unlisted = {k: v if len(v) > 1 else v[0] for k, v in data.items()}
    seen: dict[str, Any] = {"loss": [], "grad_norm": [], "valid": []}
    for chunk in job.model:
        chunk.train()
    training.get_forward_backward_func = lambda **_: function
    for iteration in range(args.train_iters):
        result = training.train_step(
            step, unlisted["train"], job.model, job.optimizer, job.scheduler, job.config,
            function, iteration=iteration,
        )  # fmt: skip
        seen["loss"].append({k: float(v).hex() for k, v in result[0].items()})
        seen["grad_norm"].append(float(result[5]).hex())
        if iteration + 1 == EVALUATE_AFTER:
            losses, _, _ = training.evaluate(
                step, unlisted["valid"], job.model, None, job.config, eval_iters=2
            )
            seen["valid"].append({k: float(v).hex() for k, v in losses.items()})
    seen["parameters"] = job.digest()
    return seen


def train(step: Any, model: Any, optimizer: Any, scheduler: Any, train_data: Any, valid_data: Any,
          _process: Any, config: Any, *_rest: Any, **_named: Any) -> tuple[int, int]:  # fmt: skip
    """Stands in for Megatron's ``train``."""
    args = get_args()
    for chunk in model:
        chunk.train()
    config.grad_scale_func = optimizer.scale_loss
    config.timers = get_timers()
    config.finalize_model_grads_func = training.finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func = config.no_sync_func[0]
    job = Job(model, optimizer, scheduler, config)
    tapes = {
        kind: [
            None if it is None else Tape(it)
            for it in (source if isinstance(source, list) else [source])
        ]
        for kind, source in (("train", train_data), ("valid", valid_data))
    }
    cases = importlib.import_module(CASES)
    report: dict[str, Any] = {}
    stock = schedules.get_forward_backward_func.optpipe_stock()
    for name, function, after in cases.cases(args, stock, OUT):
        report[name] = one_run(job, tapes, function, step)
        if after is not None:
            report[name].update(after())
    rank = torch.distributed.get_rank()
    (OUT / f"rank{rank}.json").write_text(json.dumps(report))
    return 0, 0


if __name__ == "__main__":
    OUT, CASES = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    OUT.mkdir(parents=True, exist_ok=True)
    from megatron_optpipe.megatron import pretrain

    training.train = train
    sys.exit(pretrain.main())
