"""The whole way through Megatron's own loop: measure, plan, train; and off means off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_optpipe.core import (
    load_plan,
    load_problem,
    require_valid,
    save_plan,
    save_problem,
    summarize,
    time_orders,
)
from megatron_optpipe.megatron.job import with_memory
from megatron_optpipe.planner import PlannerOptions, make_plan
from megatron_optpipe.planner.orders import one_f_one_b
from megatron_optpipe.view.measured import read_measured
from tests.megatron.jobs import ROOT, needs_megatron, progress, train

pytestmark = needs_megatron

PIPELINE = ("--pipeline-model-parallel-size", "2", "--eval-interval", "3")
OURS = (*PIPELINE, "--pipeline-schedule", "optpipe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the measured problem of the job."""
    path = tmp_path_factory.mktemp("job")
    flags = ("--optpipe-write-problem", str(path / "measured" / "problem.json"))
    ended = train(2, *OURS, *flags, "--optpipe-profile-iterations", "2", "--train-iters", "4")
    assert ended.returncode == 0, ended.output[-6000:]
    assert "measured 2 iterations" in ended.output
    return path


def test_the_measured_problem_is_true_to_the_job(folder: Path) -> None:
    problem = load_problem(folder / "measured" / "problem.json")
    assert problem.num_microbatches == 8
    assert problem.stage_device == (0, 1)
    first, last = problem.stages
    for stage in problem.stages:
        assert 0 < stage.backward_frees_bytes < stage.activation_bytes
        # Nearly everything leaves; small tensors (below 2 kB each) stay.
        assert 0.95 * stage.activation_bytes < stage.offload_bytes <= stage.activation_bytes
        assert stage.wire_bytes == stage.offload_bytes
        assert min(stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) > 0.01
    # Beside as many layers the last stage has the logits: 32 x 2 tokens, 127 words padded to 128.
    assert last.activation_bytes - first.activation_bytes > 32 * 2 * 128 * 4
    # 1F1B holds two microbatches on the first rank, and the limit is its peak there.
    assert problem.devices[0].memory_bytes == 2 * first.activation_bytes
    assert problem.devices[1].memory_bytes == last.activation_bytes
    assert all(link.gbps > 0.05 for link in problem.links.values())
    assert problem.hop_ms(0, 1) > 0


def test_training_under_a_plan_prints_the_numbers_of_stock(folder: Path) -> None:
    measured = load_problem(folder / "measured" / "problem.json")
    endless = with_memory(measured, 10**12)
    peak = max(summarize(endless, time_orders(endless, one_f_one_b(endless), method="")).peak_bytes)
    problem = with_memory(measured, int(0.7 * peak))
    plan = make_plan(problem, PlannerOptions(method="greedy"))
    assert sum(summarize(problem, plan).moved_bytes) > 0
    save_problem(problem, folder / "problem.json")
    save_plan(plan, folder / "plan.json")
    log = folder / "log"
    ended = train(
        2, *OURS, "--optpipe-plan", str(folder / "plan.json"), "--optpipe-log-dir", str(log)
    )
    assert ended.returncode == 0, ended.output[-6000:]
    stock = train(2, *PIPELINE)
    assert stock.returncode == 0, stock.output[-6000:]
    numbers = progress(stock.output)
    assert len([line for line in numbers if "grad norm" in line]) == 10
    assert len([line for line in numbers if "lm loss PPL" in line]) == 5
    assert progress(ended.output) == numbers

    assert load_plan(log / "plan.json") == plan
    assert load_problem(log / "problem.json").digest == problem.digest
    timeline = read_measured(problem, log)
    for device, entry in enumerate(problem.devices):
        measured_peak = timeline.peak_bytes(device)
        assert 0 < measured_peak <= entry.memory_bytes
        document = json.loads((log / f"measured-rank{device}.json").read_text())
        assert [i["iteration"] for i in document["iterations"]] == list(range(1, 11))
        assert document["moved_bytes"] == summarize(problem, plan).moved_bytes[device]
    assert "peak activations planned" in ended.output


def test_the_flag_alone_makes_a_safe_plan(folder: Path) -> None:
    log = folder / "alone"
    ended = train(2, *OURS, "--train-iters", "2", "--optpipe-log-dir", str(log))
    assert ended.returncode == 0, ended.output[-6000:]
    problem, plan = load_problem(log / "problem.json"), load_plan(log / "plan.json")
    require_valid(problem, plan)
    assert problem.name == "not measured"
    # In flight on the first rank: never more than 1F1B, two microbatches of two ranks.
    assert summarize(problem, plan).peak_bytes[0] <= 2 * problem.stages[0].activation_bytes


OFF = """
import os, sys
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.training import arguments, training
import megatron.core.pipeline_parallel as package
from megatron_optpipe.megatron import hook

def symbols():
    return [
        arguments.add_megatron_arguments, arguments.validate_args, arguments.parse_args,
        schedules.get_forward_backward_func, package.get_forward_backward_func,
        training.get_forward_backward_func, layers.LinearWithGradAccumulationAndAsyncCommunication,
        schedules.forward_step, schedules.backward_step,
    ]

stock = symbols()
for flags in sys.argv[1:]:  # one process each: what is replaced stays replaced
    if os.fork() == 0:
        hook.install()
        hook.install()
        assert arguments.add_megatron_arguments is not stock[0]
        sys.argv = ["x", *flags.split()]
        args = arguments.parse_args()
        same = [a is b for a, b in zip(symbols(), stock)]
        print(f"SAME {flags}: {all(same)} {args.pipeline_schedule}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_with_the_flag_off_every_symbol_is_the_stock_object() -> None:
    off, on = "--pipeline-schedule megatron", "--pipeline-schedule optpipe"
    ignored = "--optpipe-log-dir x"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OFF, "", off, ignored, on],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    lines = [x for x in done.stdout.splitlines() if x.startswith(("SAME", "optpipe:"))]
    assert lines[:2] == ["SAME : True megatron", f"SAME {off}: True megatron"], done.stderr[-3000:]
    assert lines[2:4] == [
        "optpipe: --optpipe-log-dir ignored without --pipeline-schedule optpipe",
        f"SAME {ignored}: True megatron",
    ]
    assert lines[4].startswith("optpipe: replaced megatron.core.pipeline_parallel.get_forward")
    assert lines[5:] == [f"SAME {on}: False optpipe"]
