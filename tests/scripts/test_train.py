"""The pieces of ``scripts/train.py`` that need no run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.plan import load_plan
from megatron_optpipe.core.problem import Device, Link, Problem, Stage, load_problem, save_problem
from megatron_optpipe.core.timing import summarize
from tests.megatron.checkouts import write_tree

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "train.py"

LOG_LINE = (
    " [2030-01-01 10:00:00.123456] iteration        3/      12 | consumed samples:           48 |"
    " elapsed time per iteration (ms): 886.7 | learning rate: 2.000000E-03 | global batch size: 16"
    " | lm loss: 4.954979E+00 | loss scale: 1.0 | grad norm: 2.970 | number of skipped iterations:"
)


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("optpipe_scripts_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_measuring_run_does_not_save(train: ModuleType) -> None:
    flags = ["--save", "d", "--bf16", "--load=d", "--lr", "1", "--train-iters", "9"]
    kept = train._without(flags, train._NOT_WHILE_MEASURING)
    assert kept == ["--bf16", "--lr", "1"]


def test_what_the_user_adds_comes_after_the_defaults(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKS", "2")
    monkeypatch.delenv("MEGATRON", raising=False)
    command = train.Machine(4, on_gpus=False).command(["--pipeline-model-parallel-size", "2"])
    assert command[1:3] == ["-m", "torch.distributed.run"]
    script = command.index("megatron_optpipe.cpu")
    assert command[script + 1 : script + 3] == ["-m", "megatron_optpipe.megatron.pretrain"]
    assert command[command.index("--distributed-backend") + 1] == "gloo"
    assert command[command.index("--num-layers-per-virtual-pipeline-stage") + 1] == "1"
    assert command[-2:] == ["--pipeline-model-parallel-size", "2"]


def test_gpus_get_nccl_and_no_stand_in_and_a_checkout_its_own_script(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGATRON", str(tmp_path))
    command = train.Machine(4, on_gpus=True).command([])
    assert str(tmp_path / "pretrain_gpt.py") in command
    assert command[command.index("--distributed-backend") + 1] == "nccl"
    assert not {"megatron_optpipe.cpu", "megatron_optpipe.megatron.pretrain"} & set(command)


def test_log_lines_are_cut_to_what_matters(train: ModuleType) -> None:
    assert train._PROGRESS.search(LOG_LINE)
    assert train._short(LOG_LINE) == (
        "  iteration 3/ 12 | elapsed time per iteration (ms): 886.7 | lm loss: 4.954979E+00"
        " | grad norm: 2.970"
    )
    valid = " validation loss at iteration 5 | lm loss value: 4.29E+00 | lm loss PPL: 7.3E+01 | \n"
    assert train._PROGRESS.search(valid)
    assert train._short(valid).startswith("  validation loss at iteration 5 | lm loss value: 4.29")
    assert not train._PROGRESS.search("  lm_loss_something ............ 3")
    assert train._TELLING.search("optpipe: --optpipe-plan x: no such file")
    assert train._TELLING.search("[rank1]: RuntimeFault: rank 1, F(0,1)")
    assert not train._TELLING.search("torch.distributed.elastic.errors.ChildFailedError: ")


def test_the_limit_forces_offloading_and_the_plan_keeps_it(
    train: ModuleType, tmp_path: Path
) -> None:
    stage = Stage(10.0, 11.0, 6.0, 8_000_000, 5_000_000, offload_bytes=6_000_000)
    link = Link(gbps=4.0)
    problem = Problem(
        num_microbatches=8,
        stage_device=(0, 1, 2, 3),
        stages=(stage,) * 4,
        devices=tuple(Device(1 << 40, f"d{i}", f"h{i}") for i in range(4)),
        links={f"{way}{i}": link for way in "dh" for i in range(4)},
        p2p_ms=0.1,
    )
    files = [tmp_path / name for name in ("measured.json", "problem.json", "plan.json")]
    save_problem(problem, files[0])
    train._plan(*files)
    limited, plan = load_problem(files[1]), load_plan(files[2])
    limit_bytes = int(0.6 * 4 * 8_000_000)
    assert {device.memory_bytes for device in limited.devices} == {limit_bytes}
    summary = summarize(limited, plan)
    assert max(summary.peak_bytes) <= limit_bytes
    assert sum(summary.moved_bytes) > 0


def test_a_limit_that_is_given_is_taken(train: ModuleType) -> None:
    flag = "--optpipe-memory-limit"
    assert train._given(["--lr", "1", flag, "2GB"], flag) == "2GB"
    assert train._given([f"{flag}=2GB", flag, "3GB"], flag) == "3GB"
    assert train._given(["--lr", "1"], flag) is None


def test_an_unpatched_checkout_is_refused_with_the_remedy(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGATRON", str(write_tree(tmp_path)))
    with pytest.raises(OptPipeError, match=r"clean; apply the patch first: .*optpipe patch apply"):
        train._require_patched()
