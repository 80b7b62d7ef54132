"""Measure, plan, train: a small byte-level GPT on real text. Started by ``train.sh``.

Three phases: a short run that measures the job, a plan under a memory limit that forces
offloading, and the training run under that plan. Everything lies in ``runs/``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.plan import load_plan
from megatron_optpipe.core.problem import load_problem, save_problem
from megatron_optpipe.core.timing import summarize, time_orders
from megatron_optpipe.megatron.cpu import CPU_FLAGS
from megatron_optpipe.megatron.dataset import TOKENIZER_FLAGS, build_dataset, installation_text
from megatron_optpipe.units import UnitError, format_bytes, format_ms, parse_bytes

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"

#: The default job: small enough for four ranks on two cores.
NUM_RANKS = 4
NUM_LAYERS = 8
TRAIN_ITERATIONS = 12
PROFILE_ITERATIONS = 3
MODEL_FLAGS = (
    f"--num-layers {NUM_LAYERS} --hidden-size 128 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 16 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --seed 1234 --split 90,8,2 "
    "--eval-iters 2 --log-interval 1 --num-workers 0"
).split()

#: Activations may use this part of what 1F1B needs on its fullest rank.
LIMIT_SHARE = 0.6
PLANNER_TIME_S = 5

#: Flags of the user that the measuring run must not see, each with one value.
_NOT_WHILE_MEASURING = ("--save", "--load", "--tensorboard-dir", "--train-iters")

#: What of a run's output is shown; all of it lies in the log.
_PROGRESS = re.compile(r"(iteration +\d+/|validation loss at).*lm loss")
_FIELDS = ("iteration", "lm loss", "grad norm", "validation", "elapsed")

#: What is shown of the log of a run that failed: our own lines and the names of errors.
_TELLING = re.compile(
    r"optpipe: (?!replaced)|^(\[rank\d+\]: )?(?!.*ChildF)[A-Za-z_.]*(Error|Fault): "
)
MAX_TELLING_LINES = 6


@dataclass(frozen=True, slots=True)
class Machine:
    """What the run uses: one process a rank, on GPUs with NCCL or on the CPU with gloo."""

    num_ranks: int
    on_gpus: bool

    @classmethod
    def find(cls) -> Machine:
        """GPUs where there are at least two (a pipeline on one would fight over it)."""
        num_gpus = 0
        if Path("/dev/nvidiactl").exists():  # else not worth seconds to import torch
            import torch

            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_gpus >= 2:
            return cls(NUM_RANKS if num_gpus >= NUM_RANKS else 2, True)
        return cls(NUM_RANKS, False)

    def command(self, flags: Sequence[str]) -> list[str]:
        """The command line that runs Megatron with ``flags``."""
        checkout = os.environ.get("MEGATRON")
        script = [str(Path(checkout).resolve() / "pretrain_gpt.py")] if checkout else None
        entry = script or ["-m", "megatron_optpipe.megatron.pretrain"]
        if not self.on_gpus:
            entry = ["-m", "megatron_optpipe.cpu", *entry]
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        where = f"--nproc-per-node {self.num_ranks} --master-addr 127.0.0.1 --master-port"
        return [*launcher, *where.split(), str(_free_port()), *entry, *self._flags(), *flags]

    def _flags(self) -> list[str]:
        # The split of B and W is for Megatron's local layers, so no Transformer Engine either way.
        flags = list(CPU_FLAGS)
        if self.on_gpus:
            flags[flags.index("gloo")] = "nccl"
        flags += ["--pipeline-model-parallel-size", str(self.num_ranks)]
        chunks = int(os.environ.get("CHUNKS", "1"))
        if chunks > 1:
            layers = NUM_LAYERS // self.num_ranks // chunks
            flags += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
            # With several chunks forwards run in another order than stock's, and would draw
            # other dropout masks.
            flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
        return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _without(flags: Iterable[str], unwanted: Sequence[str]) -> list[str]:
    """``flags`` without those unwanted and the value after each."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
        elif flag in unwanted:
            skip = True
        elif flag.split("=", 1)[0] not in unwanted:
            kept.append(flag)
    return kept


def _run(machine: Machine, flags: Sequence[str], log: Path) -> None:
    """Run Megatron, show the lines that matter, keep all of them in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            machine.command(flags),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if _PROGRESS.search(line):
                print(_short(line), flush=True)
        code = process.wait()
    if code != 0:
        lines = log.read_text(encoding="utf-8").splitlines()
        for line in [line for line in lines if _TELLING.search(line)][:MAX_TELLING_LINES]:
            print(f"  {line.strip()}", file=sys.stderr)
        raise OptPipeError(f"the run ended with exit code {code}; its output is in {log}")


def _short(line: str) -> str:
    """A line of Megatron's log without the fields that do not matter here."""
    line = re.sub(r"^.*?(?=iteration +\d+/|validation loss at)", "", line)
    fields = [" ".join(field.split()) for field in line.split("|")]
    return "  " + " | ".join(field for field in fields if field.startswith(_FIELDS))


def _measure(machine: Machine, flags: Sequence[str], problem_file: Path) -> None:
    flags = [
        *_without(flags, _NOT_WHILE_MEASURING),
        *("--train-iters", str(PROFILE_ITERATIONS + 1), "--eval-interval", "1000"),
        *("--eval-iters", "0", "--pipeline-schedule", "optpipe"),
        *("--optpipe-profile-iterations", str(PROFILE_ITERATIONS)),
        *("--optpipe-write-problem", str(problem_file)),
    ]
    _run(machine, flags, problem_file.with_name("measure.log"))


def _plan(
    measured_file: Path, problem_file: Path, plan_file: Path, limit_bytes: int | None = None
) -> None:
    """Plan the measured job under ``limit_bytes``, or under a limit that 1F1B cannot keep."""
    from megatron_optpipe.megatron.job import with_memory
    from megatron_optpipe.planner.orders import interleaved, one_f_one_b

    measured = load_problem(measured_file)
    roomy = with_memory(measured, sys.maxsize)
    order = interleaved if measured.num_stages > measured.num_devices else one_f_one_b
    classic = time_orders(roomy, order(roomy), method="1f1b")
    peak_bytes = max(summarize(roomy, classic).peak_bytes)
    limit_bytes = limit_bytes or int(LIMIT_SHARE * peak_bytes)
    print(
        f"  1F1B would take {format_ms(classic.makespan_ms)} and hold {format_bytes(peak_bytes)};"
        f" the limit is {format_bytes(limit_bytes)}"
    )
    save_problem(with_memory(measured, limit_bytes), problem_file)
    words = ["plan", str(problem_file), "-o", str(plan_file), "--time-limit", str(PLANNER_TIME_S)]
    done = subprocess.run([sys.executable, "-m", "megatron_optpipe.cli", *words], check=False)
    if done.returncode != 0:
        raise OptPipeError(f"no plan for {problem_file}")


def _report(log_dir: Path, picture: Path) -> None:
    """Plan against measurement, from what the run wrote, and the path of the picture of both."""
    from megatron_optpipe.view.gantt import save_gantt
    from megatron_optpipe.view.measured import read_measured

    problem, plan = load_problem(log_dir / "problem.json"), load_plan(log_dir / "plan.json")
    planned, measured = summarize(problem, plan), read_measured(problem, log_dir)
    moved_bytes = sum(
        json.loads(path.read_text(encoding="utf-8")).get("moved_bytes", 0)
        for path in log_dir.glob("measured-rank*.json")
    )
    rows = [
        ("", "planned", "measured"),
        ("makespan", format_ms(planned.makespan_ms), format_ms(measured.makespan_ms)),
        ("bubble", f"{planned.bubble:.1%}", f"{measured.bubble:.1%}"),
        ("moved", format_bytes(sum(planned.moved_bytes)), format_bytes(moved_bytes)),
    ]
    for device, peak_bytes in enumerate(planned.peak_bytes):
        limit = format_bytes(problem.devices[device].memory_bytes)
        peaks = (format_bytes(peak_bytes), format_bytes(measured.peak_bytes(device)))
        rows.append((f"peak of rank {device} (limit {limit})", *peaks))
    width = max(len(name) for name, _, _ in rows)
    for name, left, right in rows:
        print(f"  {name:<{width}}  {left:>12}  {right:>12}")
    save_gantt(problem, plan, picture, measured)
    print(f"  picture: {picture}")


def _given(arguments: Sequence[str], flag: str) -> str | None:
    """The value of ``flag`` in ``arguments`` (``--flag value`` or ``--flag=value``), the last."""
    found = None
    for word, after in zip(arguments, [*arguments[1:], ""]):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.split("=", 1)[1]
    return found


def _measure_and_plan(machine: Machine, flags: Sequence[str], folder: Path) -> list[str]:
    """The first two phases; the flags that make the third follow the plan."""
    given = _given(flags, "--optpipe-memory-limit")
    limit_bytes = None if given is None else parse_bytes(given)
    print("== measuring the job", flush=True)
    _measure(machine, flags, folder / "measured.json")
    print("== planning", flush=True)
    problem_file, plan_file = folder / "problem.json", folder / "plan.json"
    _plan(folder / "measured.json", problem_file, plan_file, limit_bytes)
    return ["--optpipe-plan", str(plan_file), "--optpipe-problem", str(problem_file)]


def main(arguments: Sequence[str]) -> int:
    """All three phases with ``arguments`` added to Megatron's command line."""
    began = time.monotonic()
    folder = RUNS / "latest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _require_patched()
        machine = Machine.find()
        print(f"== {machine.num_ranks} ranks on {'GPUs, NCCL' if machine.on_gpus else 'CPU, gloo'}")
        data = build_dataset(installation_text(), RUNS / "data")
        flags = [*MODEL_FLAGS, "--data-path", str(data), *TOKENIZER_FLAGS, *arguments]
        ours: list[str] = []
        planned = _given(arguments, "--pipeline-schedule") != "megatron"
        if planned:
            ours = ["--pipeline-schedule", "optpipe", "--optpipe-log-dir", str(folder / "log")]
            if _given(arguments, "--optpipe-plan") is None:
                ours += _measure_and_plan(machine, flags, folder)
        print("== training", flush=True)
        training = ["--train-iters", str(TRAIN_ITERATIONS), "--eval-interval", "5", *flags]
        _run(machine, [*training, *ours], folder / "train.log")
        if planned:
            print("== plan against measurement", flush=True)
            _report(folder / "log", folder / "gantt.png")
    except (OptPipeError, UnitError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    print(f"== done in {time.monotonic() - began:.0f} s")
    return 0


def _require_patched() -> None:
    checkout = os.environ.get("MEGATRON")
    if not checkout:
        return
    from megatron_optpipe.megatron import patcher

    state = patcher.status(Path(checkout)).state
    if state != "applied":
        raise OptPipeError(
            f"MEGATRON={checkout}: {state}; apply the patch first: "
            f".venv/bin/optpipe patch apply {checkout}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
