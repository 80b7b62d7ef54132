"""What a run leaves behind in ``--optpipe-log-dir``, and the summary at its end.

``plan.json`` and ``problem.json`` are written at the start, ``measured-rank{r}.json`` (the last
iteration, as lanes of ops, the peak of all iterations, and the peak and moved bytes of each of the
last thousand) at each log interval and at the end. With data or tensor parallelism the pipeline of
global rank 0 writes.
"""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from collections import deque
from pathlib import Path
from typing import Any

import torch

from megatron_optpipe.core.files import write_atomically
from megatron_optpipe.core.plan import Plan, save_plan
from megatron_optpipe.core.problem import Problem, save_problem
from megatron_optpipe.core.timing import summarize
from megatron_optpipe.megatron.engine import Engine
from megatron_optpipe.units import format_bytes, format_ms

__all__ = ["RunLog", "summary_lines"]

LANES = ("compute", "offload", "reload")

MOST_ITERATIONS = 1000
"""So many of the last iterations are kept, gathered and written: a run may have a million."""


class RunLog:
    """Collects every training iteration of this rank; gathers within the pipeline when due."""

    def __init__(self, problem: Problem, plan: Plan, args: Namespace, pp_group: Any) -> None:
        self._problem, self._plan = problem, plan
        self._folder = Path(args.optpipe_log_dir)
        self._group = pp_group
        self._interval = max(1, getattr(args, "log_interval", None) or 1)
        self._args = args
        self._next = (getattr(args, "iteration", None) or 0) + 1
        self._last = getattr(args, "train_iters", None)
        self._exit_interval: int = getattr(args, "exit_interval", None) or 0
        self._history: deque[dict[str, Any]] = deque(maxlen=MOST_ITERATIONS)
        self._peak_bytes = 0
        self._writes = 0 in torch.distributed.get_process_group_ranks(pp_group)
        if torch.distributed.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for stale in self._folder.glob("measured-rank*.json"):
                stale.unlink()
            save_problem(problem, self._folder / "problem.json")
            save_plan(plan, self._folder / "plan.json")

    def add(self, engine: Engine) -> None:
        """Take in an iteration that has just ended. Collective where a write is due."""
        recorder = engine.recorder
        engine.read_times()
        began_ms, ended_ms = recorder.span_ms
        self._peak_bytes = max(self._peak_bytes, recorder.peak_bytes or 0)
        iteration = self._number()
        self._history.append(
            {
                "iteration": iteration,
                "span_ms": round(ended_ms - began_ms, 3),
                "peak_bytes": recorder.peak_bytes,
                "moved_bytes": recorder.moved_bytes,
            }
        )
        is_last = iteration == self._last or (
            self._exit_interval > 0 and iteration % self._exit_interval == 0
        )
        if self._writes and (is_last or iteration % self._interval == 0):
            documents = self._gather(engine)
            mine = documents[engine.device]
            path = self._folder / f"measured-rank{engine.device}.json"
            write_atomically(path, json.dumps(mine, separators=(",", ":")) + "\n")
            # Rank 0 speaks of files that lie there.
            torch.distributed.barrier(group=self._group)
            if is_last and torch.distributed.get_rank() == 0:
                for line in summary_lines(self._problem, self._plan, documents):
                    print(f"optpipe: {line}", flush=True)
                print(f"optpipe: measured files are in {self._folder}", flush=True)

    def _number(self) -> int:
        """The number of the iteration that has just ended.

        Megatron's own where it is ahead (``--iterations-to-skip``); a training loop of one's own
        may leave that standing, so it is counted too.
        """
        current = getattr(self._args, "curr_iteration", None)
        number: int = max(self._next, 0 if current is None else current + 1)
        self._next = number + 1
        return number

    def _gather(self, engine: Engine) -> list[dict[str, Any]]:
        """Every device's measurement, on one clock where all ranks share a machine."""
        world = torch.distributed
        document = engine.recorder.to_dict()
        # The promise is about every iteration, so the peak is that of all.
        document["peak_bytes"] = self._peak_bytes
        document["iterations"] = list(self._history)
        parcel = (socket.gethostname(), engine.started_s, document)
        parcels: list[Any] = [None] * self._group.size()
        world.all_gather_object(parcels, parcel, group=self._group)
        zero_s = min(started for _, started, _ in parcels)
        one_host = len({host for host, _, _ in parcels}) == 1
        documents = []
        for _, started_s, entry in parcels:
            shift_ms = (started_s - zero_s) * 1e3 if one_host else 0.0
            documents.append(_shifted(entry, shift_ms))
        return documents


def summary_lines(problem: Problem, plan: Plan, documents: list[dict[str, Any]]) -> list[str]:
    """Plan against measurement, for people: makespan, bubble, peak against limit, moved bytes."""
    planned = summarize(problem, plan)
    ends = [[op[3:5] for op in d["compute"]] for d in documents]
    zero_ms = min(began for ops in ends for began, _ in ops)
    makespan_ms = max(ended for ops in ends for _, ended in ops) - zero_ms
    busy_ms = [sum(ended - began for began, ended in ops) for ops in ends]
    bubble = 1 - sum(busy_ms) / len(busy_ms) / makespan_ms
    moved = sum(d["moved_bytes"] for d in documents)
    lines = [
        f"plan {plan.method}: makespan planned {format_ms(planned.makespan_ms)}, measured "
        f"{format_ms(makespan_ms)}; bubble planned {planned.bubble:.1%}, measured {bubble:.1%}",
        f"offloaded per iteration: planned {format_bytes(sum(planned.moved_bytes))}, measured "
        f"{format_bytes(moved)}",
    ]
    for device, document in enumerate(documents):
        lines.append(
            f"rank {device}: peak activations planned {format_bytes(planned.peak_bytes[device])}, "
            f"measured {format_bytes(document['peak_bytes'])}, limit "
            f"{format_bytes(problem.devices[device].memory_bytes)}"
        )
    return lines


def _shifted(document: dict[str, Any], shift_ms: float) -> dict[str, Any]:
    lanes = {
        lane: [
            [kind, stage, microbatch, round(began + shift_ms, 6), round(ended + shift_ms, 6)]
            for kind, stage, microbatch, began, ended in document.get(lane, ())
        ]
        for lane in LANES
    }
    return {**document, **lanes}
