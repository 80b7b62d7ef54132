"""Solving in a process of its own, which can be killed: time, memory and crashes stay there."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_optpipe.planner.milp_model import Arrays, Floats
from megatron_optpipe.planner.solve_child import solve_arrays

CHILD = Path(__file__).with_name("solve_child.py")
GRACE_S = 1.2
"""How long past its time limit a solver may go on before it is killed."""
TOLERANCE = 1e-5
DEFAULT_MEMORY_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver said. ``x`` is present only where it obeys the program."""

    status: str
    """``optimal``, ``time limit``, ``infeasible``, or ``failed: ...``."""
    x: Floats | None = None
    bound: float | None = None
    nodes: int = 0

    @property
    def failed(self) -> bool:
        """Whether the solver broke (crash, nonsense, kill), rather than answered."""
        return self.status.startswith("failed")


def solve(
    arrays: Arrays,
    time_limit_s: float,
    *,
    mip_gap: float = 0.0,
    presolve: bool = True,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    child: Path | None = None,
) -> Answer:
    """Minimise; comes back at most ``GRACE_S`` (plus the kill) after ``time_limit_s``.

    Never raises for what the solver does. ``child`` is replaced by tests.
    """
    begun = time.monotonic()
    settings = {
        "options": {
            "time_limit": max(0.05, time_limit_s - 0.4),  # the start-up of the process
            "mip_rel_gap": mip_gap,
            "presolve": presolve,
        },
        "memory_bytes": memory_bytes,
        "hard_limit_s": time_limit_s + GRACE_S,
    }
    request = io.BytesIO()
    named: dict[str, Any] = arrays._asdict()
    np.savez(request, settings=np.array(json.dumps(settings)), **named)
    left = time_limit_s + GRACE_S - (time.monotonic() - begun)
    output = run_child(child or CHILD, request.getvalue(), left)
    return output if isinstance(output, Answer) else _read(arrays, output)


def run_child(script: Path, request: bytes, limit_s: float) -> bytes | Answer:
    """What a script writes for a request on its stdin; an ``Answer`` says how it failed.

    After ``limit_s`` it is killed.
    """
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the planner, which then kills the solver
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, errors = process.communicate(request, timeout=max(0.1, limit_s))
    except subprocess.TimeoutExpired:
        return Answer("failed: killed, it did not stop at its time limit")
    finally:
        _end(process)
    if process.returncode:
        return Answer(f"failed: {_why(process.returncode, errors)}")
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _why(returncode: int, errors: bytes) -> str:
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    last = errors.decode(errors="replace").strip().splitlines()
    return last[-1][:200] if last else f"ended with status {returncode}"


def solve_inline(
    arrays: Arrays, time_limit_s: float, *, mip_gap: float = 0.0, presolve: bool = True
) -> Answer:
    """The same in this process: no start-up, no protection. For tests and benches."""
    options = {"time_limit": time_limit_s, "mip_rel_gap": mip_gap, "presolve": presolve}
    return _judge(arrays, solve_arrays(arrays._asdict(), options))


def _read(arrays: Arrays, output: bytes) -> Answer:
    try:
        return _judge(arrays, dict(np.load(io.BytesIO(output), allow_pickle=False)))
    except Exception as failure:  # whatever was written, it is not an answer
        return Answer(f"failed: unreadable answer ({type(failure).__name__})")


def _judge(arrays: Arrays, data: Mapping[str, Any]) -> Answer:
    status, x = int(data["status"]), np.array(data["x"], dtype=np.float64)
    bound, nodes = float(data["bound"]), int(data["nodes"])
    names = {0: "optimal", 1: "time limit", 2: "infeasible"}
    if status not in names:
        return Answer(f"failed: solver status {status}")
    proven = bound if np.isfinite(bound) else None
    if not x.size:
        if status == 0:
            return Answer("failed: optimal without a solution")
        return Answer(names[status], None, proven, nodes)
    broken = _broken(arrays, x)
    if broken:
        return Answer(f"failed: {broken}")
    return Answer(names[status], x, proven, nodes)


def _broken(arrays: Arrays, x: Floats) -> str | None:
    """Why ``x`` is no solution of the program after rounding its integers, or None."""
    if x.shape != arrays.objective.shape or not bool(np.all(np.isfinite(x))):
        return "the solution has another shape or is not finite"
    whole = arrays.integrality > 0
    if bool(np.any(np.abs(x[whole] - np.round(x[whole])) > TOLERANCE)):
        return "the solution has fractions where it must be whole"
    x[whole] = np.round(x[whole])
    if bool(np.any(x < arrays.lower - 1e-3) or np.any(x > arrays.upper + 1e-3)):
        return "the solution leaves its bounds"
    rows = np.bincount(
        arrays.row, weights=arrays.value * x[arrays.col], minlength=arrays.row_lower.size
    )
    if bool(np.any(rows < arrays.row_lower - 1e-2) or np.any(rows > arrays.row_upper + 1e-2)):
        return "the solution breaks its rows"
    return None
