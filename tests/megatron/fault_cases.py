"""A forward step that raises in the middle of an iteration, on one rank."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_optpipe.megatron.job import load_job, make_plan_for
from megatron_optpipe.megatron.schedule import PipelineRun

FAILING_RANK = 2
FAILING_CALL = 4


def cases(args: Namespace, stock: Callable[..., Any], out: Path) -> Iterator[tuple[Any, ...]]:
    """One run whose fourth forward on rank 2 raises."""
    job = load_job(args)
    run = PipelineRun(job.problem, make_plan_for(job, args), args)
    calls = 0

    def failing(*, forward_step_func: Callable[..., Any], **named: Any) -> Any:
        def step(*positional: Any) -> Any:
            nonlocal calls
            calls += 1
            if torch.distributed.get_rank() == FAILING_RANK and calls == FAILING_CALL:
                print(f"raising at {time.time()}", flush=True)
                raise ValueError("the forward step of the user failed")
            return forward_step_func(*positional)

        return run(forward_step_func=step, **named)

    yield "failing", failing, None
