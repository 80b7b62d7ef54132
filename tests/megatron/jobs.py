"""Starts Megatron jobs on the CPU for the tests: real processes, real gloo, tiny models."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
"""A job that takes longer hangs."""

JOB = (
    "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --num-layers 8 --hidden-size 32 "
    "--num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant "
    "--lr-decay-iters 100 --seed 1234 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--eval-iters 2 --eval-interval 5 --log-interval 1 --num-workers 0"
).split()
"""Eight layers, eight microbatches, ten iterations; tied embeddings, dropout 0.1 by default."""

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_megatron = pytest.mark.skipif(
    not (_has("torch") and _has("megatron.core") and _has("megatron.training")),
    reason="megatron-core is not installed (the extra `megatron`)",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended: exit code of the launcher, all output, seconds."""

    returncode: int
    output: str
    seconds: float


def run(num_ranks: int, entry: Sequence[str], flags: Sequence[str]) -> Ended:
    """Run ``entry`` (a script, or ``-m module``) under the CPU stand-in on ``num_ranks`` ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    process = subprocess.Popen(
        [*launcher, "-m", "megatron_optpipe.cpu", *entry, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, output, time.monotonic() - began)


def train(num_ranks: int, *flags: str) -> Ended:
    """Train through this project's own entry, Megatron's loop and all."""
    return run(num_ranks, ["-m", "megatron_optpipe.megatron.pretrain"], [*JOB, *flags])


def many(num_ranks: int, cases: str, out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the cases of module ``tests.megatron.{cases}``; what each rank saw of each case."""
    script = str(Path(__file__).with_name("many_plans.py"))
    command = [script, str(out), f"tests.megatron.{cases}"]
    ended = run(num_ranks, command, [*JOB, "--pipeline-schedule", "optpipe", *flags])
    assert ended.returncode == 0, ended.output[-6000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def progress(output: str) -> list[str]:
    """The losses and gradient norms that Megatron printed, each line cut down to them."""
    kept = []
    for line in output.splitlines():
        fields = [" ".join(field.split()) for field in line.split("|")]
        found = [f for f in fields if f.startswith(("lm loss", "grad norm"))]
        if found:
            kept.append("; ".join(found))
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
