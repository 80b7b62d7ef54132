"""Plans kept on disk: by problem and options, and as starts for similar problems.

One file an entry holds the problem, the options and the plan. Files are written beside their place
under a name of their own and renamed, so ranks and hosts may share the directory. An entry that
cannot be read, or whose plan no longer passes the checker, is left out with one warning. A cache
never makes planning fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_optpipe.core.check import check
from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.timing import retime
from megatron_optpipe.planner.options import PlannerOptions

SCHEMA = "optpipe.cache/1"
SIMILAR = 0.15
"""Largest relative change of any duration or size at which an old plan is tried as a start."""
MAX_TRIED = 8
MAX_ENTRIES = 1000


class PlanCache:
    """A directory of plans. Made on first use; one that cannot be written is only read."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._ignored: set[Path] = set()

    def get(self, problem: Problem, options: PlannerOptions) -> Plan | None:
        """The plan kept for exactly this problem and these options, checked again."""
        path = self._path(problem, options)
        entry = self._read(path) if path.exists() else None
        if entry is None:
            return None
        kept, plan = entry
        if kept.digest != problem.digest or check(problem, plan):
            _warn(f"{path.name}: its plan is not valid for this problem; ignored")
            return None
        return plan

    def put(self, problem: Problem, options: PlannerOptions, plan: Plan) -> None:
        """Keep a plan; the newest of equal keys stays."""
        text = json.dumps(
            {
                "schema": SCHEMA,
                "options": _plain(options),
                "problem": problem.to_dict(),
                "plan": plan.to_dict(),
            },
            separators=(",", ":"),
        )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(".partial", ".", self.directory)
            try:
                with os.fdopen(handle, "w", encoding="ascii") as stream:
                    stream.write(text)
                os.replace(partial, self._path(problem, options))
            except BaseException:
                os.unlink(partial)
                raise
            self._drop_oldest()
        except OSError as failure:
            _warn(f"{self.directory}: {failure.strerror or failure}; the plan is not kept")

    def nearest(self, problem: Problem) -> Plan | None:
        """The best start from a problem of the same shape with slightly other numbers.

        The plan is re-timed for ``problem`` and checked. None where there is none.
        """
        ranked: list[tuple[float, str, Problem, Plan]] = []
        for path in self._of_shape(problem):
            entry = self._read(path)
            if entry is not None:
                distance = _distance(entry[0], problem)
                if distance <= SIMILAR:
                    ranked.append((distance, path.name, *entry))
        ranked.sort(key=lambda found: found[:2])
        best: Plan | None = None
        for _, _, old, plan in ranked[:MAX_TRIED]:
            try:
                again = retime(problem, plan, planned_for=old)
            except OptPipeError:
                continue
            if not check(problem, again) and (best is None or again.makespan_ms < best.makespan_ms):
                best = again
        return best

    def _path(self, problem: Problem, options: PlannerOptions) -> Path:
        asked = hashlib.sha256(json.dumps(_plain(options), sort_keys=True).encode()).hexdigest()
        name = f"{_shape(problem)}-{problem.digest}-{asked[:16]}.json"
        return self.directory / name

    def _of_shape(self, problem: Problem) -> Iterator[Path]:
        try:
            yield from sorted(self.directory.glob(f"{_shape(problem)}-*.json"))
        except OSError as failure:
            _warn(f"{self.directory}: {failure.strerror or failure}; not used")

    def _read(self, path: Path) -> tuple[Problem, Plan] | None:
        try:
            if path.exists() and not path.is_file():
                raise ValueError("no file")  # a pipe would be waited for
            entry = json.loads(path.read_text(encoding="ascii"))
            if entry["schema"] != SCHEMA:
                raise OptPipeError(f"schema = {entry['schema']!r}: must be {SCHEMA!r}")
            return Problem.from_dict(entry["problem"]), Plan.from_dict(entry["plan"])
        except FileNotFoundError:
            return None  # another rank tidied up
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as failure:
            if path not in self._ignored:
                self._ignored.add(path)
                _warn(f"{path.name}: unreadable ({type(failure).__name__}); ignored")
            return None

    def _drop_oldest(self) -> None:
        entries = list(self.directory.glob("*.json"))
        if len(entries) <= MAX_ENTRIES:
            return
        age: list[tuple[float, Path]] = []
        for path in entries:
            try:
                age.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
        for _, path in sorted(age)[: len(age) - MAX_ENTRIES]:
            path.unlink(missing_ok=True)


def _plain(options: PlannerOptions) -> dict[str, Any]:
    """The options that shape a plan; where it is kept does not."""
    plain = dataclasses.asdict(options)
    plain.pop("cache_dir", None)
    return {name: value if value is None else str(value) for name, value in plain.items()}


def _shape(problem: Problem) -> str:
    """Equal for problems that differ in durations, sizes and speeds only."""
    shape = [
        problem.num_microbatches,
        problem.stage_device,
        [(device.d2h, device.h2d) for device in problem.devices],
        problem.host_memory_bytes is None,
    ]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]


def _numbers(problem: Problem) -> list[float]:
    """Everything in which two problems of one shape may differ."""
    numbers: list[float] = []
    for stage in problem.stages:
        numbers += [
            stage.forward_ms,
            stage.backward_input_ms,
            stage.backward_weight_ms,
            stage.activation_bytes,
            stage.backward_frees_bytes,
            stage.offload_bytes,
            stage.wire_bytes,
        ]
    numbers += [device.memory_bytes for device in problem.devices]
    for _, link in sorted(problem.links.items()):
        numbers.append(link.gbps)
    return numbers


def _distance(one: Problem, two: Problem) -> float:
    """Largest relative difference of any number; infinite where the shapes differ after all."""
    first, second = _numbers(one), _numbers(two)
    if len(first) != len(second):
        return float("inf")
    return max(
        (abs(a - b) / max(abs(a), abs(b)) for a, b in zip(first, second) if a != b), default=0.0
    )


def _warn(message: str) -> None:
    warnings.warn(f"plan cache: {message}", RuntimeWarning, stacklevel=3)
