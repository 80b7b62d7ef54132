"""The plan file: when each op of a problem starts, on every device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_optpipe.core.errors import PlanError
from megatron_optpipe.core.files import write_atomically
from megatron_optpipe.core.op import COMPUTE, TRANSFER, Op
from megatron_optpipe.core.schema import read_json, require_schema

SCHEMA = "optpipe.plan/1"
LANES = ("compute", "offload", "reload")
_KINDS = frozenset((*COMPUTE, *TRANSFER))
_OPTIONAL = ("lower_bound_ms", "solve_ms", "solver_status", "tool_version")


class TimedOp(NamedTuple):
    """An op and the time at which it starts, in ms from the start of the first op."""

    op: Op
    start_ms: float


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What one device does, each lane in execution order."""

    compute: tuple[TimedOp, ...]
    offload: tuple[TimedOp, ...] = ()
    reload: tuple[TimedOp, ...] = ()
    peak_bytes: int | None = None

    def lanes(self) -> Iterator[tuple[str, tuple[TimedOp, ...]]]:
        """The three lanes by name."""
        yield "compute", self.compute
        yield "offload", self.offload
        yield "reload", self.reload


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole iteration; ``problem_sha256`` ties it to the one problem it was made for."""

    problem_sha256: str
    method: str
    makespan_ms: float
    devices: tuple[DevicePlan, ...]
    lower_bound_ms: float | None = None
    solve_ms: float | None = None
    solver_status: str | None = None
    tool_version: str | None = None

    def starts(self) -> dict[Op, float]:
        """Start of every op, all devices and lanes together, in ms."""
        return {
            timed.op: timed.start_ms
            for device in self.devices
            for _, lane in device.lanes()
            for timed in lane
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as the JSON document of the contract."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "problem_sha256": self.problem_sha256,
            "method": self.method,
            "makespan_ms": self.makespan_ms,
        }
        for key in _OPTIONAL:
            if getattr(self, key) is not None:
                document[key] = getattr(self, key)
        document["devices"] = [_device_dict(device) for device in self.devices]
        return document

    def to_json(self) -> str:
        """The text of the plan file; equal plans give equal bytes."""
        return json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=True) + "\n"

    @classmethod
    def from_dict(cls, document: Any) -> Plan:
        """Read the JSON document of the contract. Raises ``PlanError``."""
        require_schema(_without_sound_ops(document), "plan.schema.json", PlanError)
        return cls(
            problem_sha256=document["problem_sha256"],
            method=document["method"],
            makespan_ms=float(document["makespan_ms"]),
            devices=tuple(_device_from(entry) for entry in document["devices"]),
            **{key: document[key] for key in _OPTIONAL if key in document},
        )


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises ``PlanError`` naming the file."""
    document = read_json(path, PlanError)
    try:
        return Plan.from_dict(document)
    except PlanError as failure:
        raise PlanError(f"{path}: {failure}") from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file; a reader sees the old file or the new one, never a part."""
    write_atomically(path, plan.to_json())


def _device_dict(device: DevicePlan) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, lane in device.lanes():
        if lane or name == "compute":
            entry[name] = [[*timed.op, timed.start_ms] for timed in lane]
    if device.peak_bytes is not None:
        entry["peak_bytes"] = device.peak_bytes
    return entry


def _without_sound_ops(document: Any) -> Any:
    """The document with every lane emptied whose ops all have the schema's shape.

    A schema validator takes half a minute for the 100,000 ops of a large plan, this takes a
    moment; what it leaves is validated as it is, so that there is one source of messages.
    """
    if not isinstance(document, dict) or not isinstance(document.get("devices"), list):
        return document

    def emptied(device: Any) -> Any:
        if not isinstance(device, dict):
            return device
        sound: dict[str, list[Any]] = {
            name: []
            for name in LANES
            if isinstance(device.get(name), list) and all(map(_is_sound_op, device[name]))
        }
        return device | sound

    return document | {"devices": [emptied(device) for device in document["devices"]]}


def _is_sound_op(entry: Any) -> bool:
    if type(entry) is not list or len(entry) != 4:
        return False
    kind, stage, microbatch, start = entry
    return (
        type(kind) is str
        and kind in _KINDS
        and type(stage) is int
        and type(microbatch) is int
        and type(start) in (int, float)
        and stage >= 0
        and microbatch >= 0
        and start >= 0
    )


def _device_from(entry: dict[str, Any]) -> DevicePlan:
    lanes = (
        tuple(
            TimedOp(Op(kind, int(stage), int(microbatch)), float(start))
            for kind, stage, microbatch, start in entry.get(name, ())
        )
        for name in LANES
    )
    compute, offload, reload = lanes
    peak = entry.get("peak_bytes")
    return DevicePlan(compute, offload, reload, None if peak is None else int(peak))
