"""Stock and two orders: for layouts and features beside the pipeline."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_optpipe.core import Device, time_orders
from megatron_optpipe.megatron.job import unmeasured
from megatron_optpipe.megatron.schedule import PipelineRun
from tests.zoo import all_forwards_first, random_topological


def cases(args: Namespace, stock: Callable[..., Any], out: Path) -> Iterator[tuple[Any, ...]]:
    """The adversary, and GPipe with each B and its W as one backward."""
    yield "stock", stock, None
    problem = unmeasured(args)
    problem = replace(problem, devices=(Device(10**12),) * problem.num_devices)
    fused = copy.copy(args)
    fused.optpipe_fuse_adjacent_bw = True
    for name, orders, how in (
        ("adversary", random_topological(problem, 1), args),
        ("fused", all_forwards_first(problem, weights_last=False), fused),
    ):
        plan = time_orders(problem, orders, method=name)
        yield name, PipelineRun(problem, plan, how), None
