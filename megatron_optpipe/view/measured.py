"""Reads what a run or a rehearsal measured: one ``measured-rank{r}.json`` a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.op import Op
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.schema import read_json
from megatron_optpipe.view.timeline import LANES, Bar, Timeline, memory_steps

__all__ = ["MeasurementError", "read_measured"]

SCHEMA = "optpipe.measurement/1"
PATTERN = "measured-rank*.json"
KEYS = ("compute", "offload", "reload")
KINDS = {"compute": "FBW", "offload": "O", "reload": "R"}


class MeasurementError(OptPipeError):
    """A measurement that cannot be read or belongs to another problem; one line."""


def read_measured(problem: Problem, directory: Path, label: str = "measured") -> Timeline:
    """The timeline of the measured files in ``directory``; one file for each device.

    The memory curve is that of the problem's bytes at the measured times; the peaks are the
    measured ones where the files have them.

    Raises:
        MeasurementError: no files, a device without a file, or a file that does not fit.
    """
    documents = dict(_documents(problem, directory))
    missing = [str(d) for d in range(problem.num_devices) if d not in documents]
    if missing:
        raise MeasurementError(
            f"{directory}: no {PATTERN} for device {', '.join(missing[:8])}; give the"
            " --optpipe-log-dir of a run with this problem"
        )
    bars: list[Bar] = []
    for device, (path, document) in sorted(documents.items()):
        for lane, key in zip(LANES, KEYS, strict=True):
            for entry in document.get(key, ()):
                bars.append(_bar(problem, path, device, lane, key, entry))
    if not any(bar.lane == "compute" for bar in bars):
        raise MeasurementError(f"{directory}: no op was measured; let the run finish an iteration")
    memory = tuple(memory_steps(problem, bars, device) for device in range(problem.num_devices))
    peaks = tuple(_peak(*documents[device]) for device in range(problem.num_devices))
    return Timeline(label, tuple(bars), memory, peaks)


def _documents(problem: Problem, directory: Path) -> Iterator[tuple[int, tuple[Path, Any]]]:
    """Device and document of every file; of several for one device the first by name counts."""
    if not directory.is_dir():
        raise MeasurementError(f"{directory}: is no directory; give the --optpipe-log-dir of a run")
    seen: set[int] = set()
    for path in sorted(directory.glob(PATTERN)):
        document = read_json(path, MeasurementError)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise MeasurementError(f"{path}: schema is not {SCHEMA!r}; measure anew")
        device = document.get("device")
        if type(device) is not int or not 0 <= device < problem.num_devices:
            raise MeasurementError(
                f"{path}: device = {device!r}, but the problem has devices 0 to"
                f" {problem.num_devices - 1}; give the problem of that run"
            )
        if device not in seen:
            seen.add(device)
            yield device, (path, document)


def _bar(problem: Problem, path: Path, device: int, lane: str, key: str, entry: Any) -> Bar:
    def refuse(why: str) -> MeasurementError:
        return MeasurementError(f"{path}: {key} has {str(entry)[:80]}: {why}; measure anew")

    if not isinstance(entry, list) or len(entry) != 5:
        raise refuse("must be [kind, stage, microbatch, start_ms, end_ms]")
    kind, stage, microbatch, start_ms, end_ms = entry
    if kind not in tuple(KINDS[key]):
        raise refuse(f"the kind must be one of {', '.join(KINDS[key])}")
    if type(stage) is not int or stage not in problem.stages_on(device):
        raise refuse(f"the stage must be one of device {device}")
    if type(microbatch) is not int or not 0 <= microbatch < problem.num_microbatches:
        raise refuse(f"the microbatch must be 0 to {problem.num_microbatches - 1}")
    for value in (start_ms, end_ms):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise refuse("times must be numbers")
    if end_ms < start_ms:
        raise refuse("it ends before it starts")
    return Bar(device, lane, Op(kind, stage, microbatch), float(start_ms), float(end_ms))


def _peak(path: Path, document: Any) -> int | None:
    peak = document.get("peak_bytes")
    if peak is not None and (type(peak) is not int or peak < 0):
        raise MeasurementError(f"{path}: peak_bytes = {peak!r}: must be a count; measure anew")
    return peak
