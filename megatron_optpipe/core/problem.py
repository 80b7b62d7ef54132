"""The problem file: a pipeline iteration to be planned, in milliseconds and bytes.

``Problem.duration_ms`` and ``Problem.memory_change`` are the only places where a duration or a
change of memory is computed (the contract, rules 1, 6 and 7).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_optpipe.core.errors import ProblemError
from megatron_optpipe.core.files import write_atomically
from megatron_optpipe.core.op import COMPUTE, TRANSFER, Op
from megatron_optpipe.core.schema import canonical_number, read_json, require_schema

SCHEMA = "optpipe.problem/1"

LEAST_OP_MS = 1e-5
"""10 ns: a shorter F or B would begin and end at the same time, as the contract compares times."""

MAX_TOTAL_MS = 4e9
"""46 days: above 2^32 ms a double no longer resolves the contract's tolerance of 1e-6 ms."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One consecutive part of the model, for one microbatch."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    activation_bytes: int
    backward_frees_bytes: int
    """What the end of B gives back; negative where B needs memory that W gives back."""
    offload_bytes: int = 0
    """What leaves the device when the activations are offloaded."""
    offload_wire_bytes: int | None = None
    """What crosses the link (after compression); ``None``: ``offload_bytes``."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that one transfer moves over the link and keeps on the host."""
        return self.offload_bytes if self.offload_wire_bytes is None else self.offload_wire_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """One pipeline rank: what activations may use, and the links that it names."""

    memory_bytes: int
    d2h: str | None = None
    h2d: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Something that carries one transfer at a time; 1 GB/s = 1e9 bytes/s."""

    gbps: float
    latency_ms: float = 0.0


class MemoryChange(NamedTuple):
    """Bytes of device memory that an op takes when it starts and (negative) gives when it ends."""

    at_start_bytes: int
    at_end_bytes: int


@dataclass(frozen=True)
class Problem:
    """One pipeline iteration: stages, devices, links, microbatches.

    Raises ``ProblemError`` (one line: field, value, rule, remedy) where the contract is broken.
    """

    num_microbatches: int
    stage_device: tuple[int, ...]
    stages: tuple[Stage, ...]
    devices: tuple[Device, ...]
    links: Mapping[str, Link]
    p2p_ms: float | tuple[tuple[float, ...], ...] = 0.0
    host_memory_bytes: int | None = None
    name: str | None = None
    notes: str | None = None
    _document: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """The file this problem was read from: the digest is of the file as it was written."""

    def __post_init__(self) -> None:
        _require_consistent(self)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def device_of(self, stage: int) -> int:
        """The device that owns ``stage``."""
        return self.stage_device[stage]

    @cached_property
    def _stages_on(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in self.devices]
        for stage, device in enumerate(self.stage_device):
            owned[device].append(stage)
        return tuple(tuple(stages) for stages in owned)

    def stages_on(self, device: int) -> tuple[int, ...]:
        """The stages of ``device`` in model order (Megatron's model chunks)."""
        return self._stages_on[device]

    def hop_ms(self, src_device: int, dst_device: int) -> float:
        """Time from the end of an op on one device to when another may use its result."""
        if src_device == dst_device:
            return 0.0
        if isinstance(self.p2p_ms, tuple):
            return self.p2p_ms[src_device][dst_device]
        return self.p2p_ms

    def can_offload(self, stage: int) -> bool:
        """Whether activations of ``stage`` may be offloaded: something to move, links to use."""
        device = self.devices[self.stage_device[stage]]
        return (
            self.stages[stage].offload_bytes > 0
            and device.d2h is not None
            and device.h2d is not None
        )

    def link_name(self, op: Op) -> str:
        """The link of an O or R op. Raises ``ProblemError`` where the device names none."""
        device = self.devices[self.stage_device[op.stage]]
        name = device.d2h if op.kind == "O" else device.h2d
        if name is None:
            raise ProblemError(
                f"{op}: device {self.stage_device[op.stage]} names no link for it; "
                "give the device d2h and h2d"
            )
        return name

    def duration_ms(self, op: Op) -> float:
        """How long an op lasts (rules 1 and 6)."""
        stage = self.stages[op.stage]
        if op.kind == "F":
            return stage.forward_ms
        if op.kind == "B":
            return stage.backward_input_ms
        if op.kind == "W":
            return stage.backward_weight_ms
        link = self.links[self.link_name(op)]
        # 1 GB/s = 1e9 bytes/s = 1e6 bytes/ms
        return link.latency_ms + stage.wire_bytes / (link.gbps * 1e6)

    def memory_change(self, op: Op) -> MemoryChange:
        """What an op does to the memory of its device (rule 7)."""
        stage = self.stages[op.stage]
        if op.kind == "F":
            return MemoryChange(stage.activation_bytes, 0)
        if op.kind == "O":
            return MemoryChange(0, -stage.offload_bytes)
        if op.kind == "R":
            return MemoryChange(stage.offload_bytes, 0)
        if op.kind == "B":
            frees = stage.backward_frees_bytes
            return MemoryChange(0, -frees) if frees >= 0 else MemoryChange(-frees, 0)
        return MemoryChange(0, -(stage.activation_bytes - stage.backward_frees_bytes))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the problem as canonical JSON (the contract, "Digest")."""
        document = {k: v for k, v in self.to_dict().items() if k not in ("name", "notes")}
        text = json.dumps(
            _canonical(document), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The problem as the JSON document of the contract; defaults are left out."""
        if self._document is not None:
            return copy.deepcopy(self._document)
        document: dict[str, Any] = {"schema": SCHEMA}
        if self.name is not None:
            document["name"] = self.name
        if self.notes is not None:
            document["notes"] = self.notes
        document["num_microbatches"] = self.num_microbatches
        document["stage_device"] = list(self.stage_device)
        document["stages"] = [_stage_dict(stage) for stage in self.stages]
        document["devices"] = [_device_dict(device) for device in self.devices]
        document["links"] = {name: _link_dict(link) for name, link in self.links.items()}
        hop = self.p2p_ms
        document["p2p_ms"] = [list(row) for row in hop] if isinstance(hop, tuple) else hop
        if self.host_memory_bytes is not None:
            document["host_memory_bytes"] = self.host_memory_bytes
        return document

    @classmethod
    def from_dict(cls, document: Any) -> Problem:
        """Read the JSON document of the contract. Raises ``ProblemError``."""
        require_schema(document, "problem.schema.json", ProblemError)
        hop = document["p2p_ms"]
        problem = cls(
            num_microbatches=int(document["num_microbatches"]),
            stage_device=tuple(int(d) for d in document["stage_device"]),
            stages=tuple(_stage_from(entry) for entry in document["stages"]),
            devices=tuple(
                Device(int(entry["memory_bytes"]), entry.get("d2h"), entry.get("h2d"))
                for entry in document["devices"]
            ),
            links={
                name: Link(float(entry["gbps"]), float(entry.get("latency_ms", 0.0)))
                for name, entry in document["links"].items()
            },
            p2p_ms=(
                tuple(tuple(float(x) for x in row) for row in hop)
                if isinstance(hop, list)
                else float(hop)
            ),
            host_memory_bytes=(
                int(document["host_memory_bytes"]) if "host_memory_bytes" in document else None
            ),
            name=document.get("name"),
            notes=document.get("notes"),
        )
        object.__setattr__(problem, "_document", copy.deepcopy(document))
        return problem


def load_problem(path: str | Path) -> Problem:
    """Read a problem file. Raises ``ProblemError`` naming the file."""
    document = read_json(path, ProblemError)
    try:
        return Problem.from_dict(document)
    except ProblemError as failure:
        raise ProblemError(f"{path}: {failure}") from None


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem file; a reader sees the old file or the new one, never a part."""
    write_atomically(path, json.dumps(problem.to_dict(), indent=1) + "\n")


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    return canonical_number(value)


def _stage_from(entry: dict[str, Any]) -> Stage:
    wire = entry.get("offload_wire_bytes")
    return Stage(
        forward_ms=float(entry["forward_ms"]),
        backward_input_ms=float(entry["backward_input_ms"]),
        backward_weight_ms=float(entry["backward_weight_ms"]),
        activation_bytes=int(entry["activation_bytes"]),
        backward_frees_bytes=int(entry["backward_frees_bytes"]),
        offload_bytes=int(entry.get("offload_bytes", 0)),
        offload_wire_bytes=None if wire is None else int(wire),
    )


def _stage_dict(stage: Stage) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "forward_ms": stage.forward_ms,
        "backward_input_ms": stage.backward_input_ms,
        "backward_weight_ms": stage.backward_weight_ms,
        "activation_bytes": stage.activation_bytes,
        "backward_frees_bytes": stage.backward_frees_bytes,
    }
    if stage.offload_bytes:
        entry["offload_bytes"] = stage.offload_bytes
    if stage.offload_wire_bytes is not None:
        entry["offload_wire_bytes"] = stage.offload_wire_bytes
    return entry


def _device_dict(device: Device) -> dict[str, Any]:
    entry: dict[str, Any] = {"memory_bytes": device.memory_bytes}
    if device.d2h is not None:
        entry["d2h"] = device.d2h
    if device.h2d is not None:
        entry["h2d"] = device.h2d
    return entry


def _link_dict(link: Link) -> dict[str, Any]:
    entry: dict[str, Any] = {"gbps": link.gbps}
    if link.latency_ms:
        entry["latency_ms"] = link.latency_ms
    return entry


def _require_consistent(problem: Problem) -> None:
    """The rules that a schema cannot state; raises ``ProblemError``."""
    count, devices = len(problem.stages), problem.num_devices
    if problem.num_microbatches < 1:
        raise ProblemError(
            f"num_microbatches = {problem.num_microbatches}: must be at least 1; raise it"
        )
    if count == 0 or devices == 0:
        raise ProblemError("stages and devices must have at least one entry each; add one")
    if len(problem.stage_device) != count:
        raise ProblemError(
            f"stage_device has {len(problem.stage_device)} entries: must have one for each of "
            f"the {count} stages; make both equally long"
        )
    for stage, device in enumerate(problem.stage_device):
        if not 0 <= device < devices:
            raise ProblemError(
                f"stage_device[{stage}] = {device}: must name a device 0 to {devices - 1}; "
                "correct it or add the device"
            )
    for device in range(devices):
        if not problem.stages_on(device):
            raise ProblemError(
                f"devices[{device}]: owns no stage; every device must own one, "
                "correct stage_device or remove the device"
            )
    for index, facts in enumerate(problem.stages):
        _require_stage(index, facts)
    for index, entry in enumerate(problem.devices):
        _require_device(index, entry, problem)
    for name, link in problem.links.items():
        _require_number(f"links.{name}.gbps", link.gbps, least=0.0, open_end=True)
        _require_number(f"links.{name}.latency_ms", link.latency_ms, least=0.0)
    _require_hops(problem)
    _require_resolvable_times(problem)
    if problem.host_memory_bytes is not None and problem.host_memory_bytes < 0:
        raise ProblemError(f"host_memory_bytes = {problem.host_memory_bytes}: must be at least 0")


def _require_stage(index: int, stage: Stage) -> None:
    where = f"stages[{index}]"
    _require_number(f"{where}.forward_ms", stage.forward_ms, least=0.0, open_end=True)
    _require_number(f"{where}.backward_input_ms", stage.backward_input_ms, least=0.0, open_end=True)
    _require_number(f"{where}.backward_weight_ms", stage.backward_weight_ms, least=0.0)
    for name in ("forward_ms", "backward_input_ms"):
        if getattr(stage, name) < LEAST_OP_MS:
            raise ProblemError(
                f"{where}.{name} = {getattr(stage, name):g}: must be at least {LEAST_OP_MS:g}, so "
                "that its start and end can be told apart to 1e-6 ms; give times in ms"
            )
    for name in ("activation_bytes", "offload_bytes"):
        if getattr(stage, name) < 0:
            raise ProblemError(f"{where}.{name} = {getattr(stage, name)}: must be at least 0")
    if stage.offload_wire_bytes is not None and stage.offload_wire_bytes < 0:
        raise ProblemError(
            f"{where}.offload_wire_bytes = {stage.offload_wire_bytes}: must be at least 0"
        )
    for name in ("backward_frees_bytes", "offload_bytes"):
        if getattr(stage, name) > stage.activation_bytes:
            raise ProblemError(
                f"{where}.{name} = {getattr(stage, name)}: must be at most activation_bytes "
                f"= {stage.activation_bytes}; lower it or raise activation_bytes"
            )


def _require_device(index: int, device: Device, problem: Problem) -> None:
    if device.memory_bytes < 0:
        raise ProblemError(
            f"devices[{index}].memory_bytes = {device.memory_bytes}: must be at least 0"
        )
    for key, name in (("d2h", device.d2h), ("h2d", device.h2d)):
        if name is not None and name not in problem.links:
            known = ", ".join(sorted(problem.links)) or "none"
            raise ProblemError(
                f"devices[{index}].{key} = {name!r}: must name a link (there are: {known}); "
                "add it under links or correct the name"
            )


def _require_hops(problem: Problem) -> None:
    hop = problem.p2p_ms
    if not isinstance(hop, tuple):
        _require_number("p2p_ms", hop, least=0.0)
        return
    size = problem.num_devices
    if len(hop) != size or any(len(row) != size for row in hop):
        raise ProblemError(
            f"p2p_ms has rows of {sorted({len(row) for row in hop})} and {len(hop)} rows: a matrix "
            f"must be {size} x {size}, from and to each device; complete it"
        )
    for src, row in enumerate(hop):
        for dst, value in enumerate(row):
            _require_number(f"p2p_ms[{src}][{dst}]", value, least=0.0)


def _require_resolvable_times(problem: Problem) -> None:
    """All ops one after another must end while a double still resolves the tolerance of times."""
    hop = problem.p2p_ms
    longest_hop = max(map(max, hop)) if isinstance(hop, tuple) else hop
    compute = transfers = 0.0
    for stage in range(problem.num_stages):
        compute += 2 * longest_hop
        compute += sum(problem.duration_ms(Op(kind, stage, 0)) for kind in COMPUTE)
        if problem.can_offload(stage):
            transfers += sum(problem.duration_ms(Op(kind, stage, 0)) for kind in TRANSFER)
    for what, one in (("ops", compute), ("transfers", transfers)):
        total = one * problem.num_microbatches
        if not total <= MAX_TOTAL_MS:
            remedy = "correct gbps" if what == "transfers" else "give times in ms"
            raise ProblemError(
                f"the times of all {what} add up to {total:.3g} ms: must be at most "
                f"{MAX_TOTAL_MS:.0e} ms, so that times can be compared to 1e-6 ms; "
                f"{remedy}, or plan fewer microbatches"
            )


def _require_number(name: str, value: float, *, least: float, open_end: bool = False) -> None:
    if not math.isfinite(value):
        raise ProblemError(f"{name} = {value}: must be a finite number; correct it")
    if value < least or (open_end and value == least):
        rule = f"greater than {least:g}" if open_end else f"at least {least:g}"
        raise ProblemError(f"{name} = {value:g}: must be {rule}; correct it")
