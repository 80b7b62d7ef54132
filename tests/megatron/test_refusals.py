"""What cannot run is refused at start-up: one line with value, rule and remedy, no traceback."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_optpipe.core import (
    Device,
    OptPipeError,
    Plan,
    Problem,
    Stage,
    save_plan,
    save_problem,
    time_orders,
)
from megatron_optpipe.megatron import hook
from megatron_optpipe.megatron.arguments import add_arguments
from megatron_optpipe.megatron.compat import CONFLICTS, Conflict, first_conflict, render_markdown
from megatron_optpipe.megatron.job import load_job, shape_of, unmeasured
from megatron_optpipe.planner.orders import one_f_one_b
from tests.megatron.jobs import needs_megatron, train


def arguments(*flags: str, **megatron: object) -> Namespace:
    """Our flags as parsed, beside the arguments of a small valid job of Megatron."""
    parser = add_arguments(ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--pipeline-schedule", "optpipe", *flags])
    job = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seq_length": 16,
        "hidden_size": 8,
        "num_layers": 4,
        "transformer_impl": "local",
        "cuda_graph_impl": "none",
        "rank": 0,
    }
    for name, value in (job | megatron).items():
        setattr(args, name, value)
    return args


def problem(
    devices: int = 2, microbatches: int = 4, chunks: int = 1, memory: int = 10**6
) -> Problem:
    stages = devices * chunks
    return Problem(
        num_microbatches=microbatches,
        stage_device=tuple(range(devices)) * chunks,
        stages=(Stage(1.0, 1.0, 1.0, 1000, 500),) * stages,
        devices=(Device(memory),) * devices,
        links={},
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A problem and a plan for it that fit ``arguments()``."""
    fitting = problem()
    plan = time_orders(fitting, one_f_one_b(fitting), method="1f1b")
    save_problem(fitting, tmp_path / "problem.json")
    save_plan(plan, tmp_path / "plan.json")
    return tmp_path / "problem.json", tmp_path / "plan.json"


def refusal(*flags: str, **megatron: object) -> str:
    """The one line that a job with these arguments gets."""
    with pytest.raises(OptPipeError) as caught:
        load_job(arguments(*flags, **megatron))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_fitting_plan_is_taken_with_the_problem_beside_it(files: tuple[Path, Path]) -> None:
    job = load_job(arguments("--optpipe-plan", str(files[1])))
    assert job.plan is not None
    assert job.plan.problem_sha256 == job.problem.digest
    assert load_job(arguments("--optpipe-problem", str(files[0]))).plan is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pipeline_model_parallel_size": 4}, "is for 2 pipeline ranks, this job has 4"),
        ({"global_batch_size": 12}, "is for 4 microbatches, this job has 6"),
        ({"data_parallel_size": 2}, "is for 4 microbatches, this job has 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "is for 1 model chunks a rank"),
    ],
)
def test_a_plan_of_another_shape(
    files: tuple[Path, Path], change: dict[str, object], says: str
) -> None:
    assert says in refusal("--optpipe-plan", str(files[1]), **change)
    assert says in refusal("--optpipe-problem", str(files[0]), **change)


def test_another_placement(tmp_path: Path) -> None:
    v_shape = replace(problem(chunks=2), stage_device=(0, 1, 1, 0))
    save_problem(v_shape, tmp_path / "v.json")
    text = refusal(
        "--optpipe-problem", str(tmp_path / "v.json"), virtual_pipeline_model_parallel_size=2
    )
    assert "Megatron places [0, 1, 0, 1]" in text


def test_a_plan_for_another_problem(files: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "other.json"
    other.parent.mkdir()
    save_problem(problem(memory=2 * 10**6), other)
    text = refusal("--optpipe-plan", str(files[1]), "--optpipe-problem", str(other))
    assert "made for problem" in text
    files[0].unlink()
    assert "add --optpipe-problem FILE" in refusal("--optpipe-plan", str(files[1]))


def test_an_invalid_plan_is_checked_before_anything_is_built(files: tuple[Path, Path]) -> None:
    document = json.loads(files[1].read_text())
    document["devices"][1]["compute"].pop()
    files[1].write_text(json.dumps(document))
    assert "W(1,3)" in refusal("--optpipe-plan", str(files[1]))


@pytest.mark.parametrize("flag", ["--optpipe-plan", "--optpipe-problem"])
@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 3}', "\x00\xff"])
def test_broken_files(tmp_path: Path, flag: str, text: str | None) -> None:
    path = tmp_path / "broken.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    assert "broken.json" in refusal(flag, str(path))


def test_limits(files: tuple[Path, Path]) -> None:
    plan, measured = ("--optpipe-plan", str(files[1])), ("--optpipe-problem", str(files[0]))
    assert "needs 2.00 kB on device 0" in refusal(*plan, "--optpipe-memory-limit", "1kB")
    load_job(arguments(*plan, "--optpipe-memory-limit", "2kB"))
    assert "one microbatch of stage 0" in refusal(*measured, "--optpipe-memory-limit", "999")
    job = load_job(arguments(*measured, "--optpipe-memory-limit", "1500"))
    assert {device.memory_bytes for device in job.problem.devices} == {1500}
    assert "needs measured bytes" in refusal("--optpipe-memory-limit", "1GB")
    assert "'much'" in refusal("--optpipe-memory-limit", "much")
    assert "above 0" in refusal("--optpipe-memory-limit", "0")
    assert "'soon'" in refusal("--optpipe-planner-time-limit", "soon")


def test_measuring_takes_no_plan(files: tuple[Path, Path], tmp_path: Path) -> None:
    write = ("--optpipe-write-problem", str(tmp_path / "p.json"))
    assert "leave out" in refusal(*write, "--optpipe-plan", str(files[1]))
    assert "at least 1" in refusal(*write, "--optpipe-profile-iterations", "0")


@needs_megatron
@pytest.mark.parametrize("schedule", ["optpipe", "megatron"])
def test_a_yaml_file_would_drop_the_flag_and_is_refused(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    hook.add_arguments(hook.add_arguments(parser))
    flags = ["--pipeline-schedule", schedule, "--yaml-cfg", "job.yaml"]
    if schedule == "megatron":
        assert parser.parse_args(flags).yaml_cfg == "job.yaml"
        return
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("optpipe: --yaml-cfg cannot be combined with optpipe: ")
    assert said.count("\n") == 1


def test_measuring_that_would_not_end_is_refused(tmp_path: Path) -> None:
    write = ("--optpipe-write-problem", str(tmp_path / "p.json"))
    said = refusal(*write, "--optpipe-profile-iterations", "4", train_iters=4)
    assert "--train-iters 4: measuring takes 5 iterations" in said
    assert not load_job(
        arguments(*write, "--optpipe-profile-iterations", "4", train_iters=5)
    ).measured


def test_without_files_the_limit_is_the_memory_of_1f1b() -> None:
    args = arguments()
    made_up = unmeasured(args)
    assert made_up.stage_device == shape_of(args).stage_device == (0, 1)
    peaks = [device.memory_bytes for device in made_up.devices]
    assert peaks == [2 * made_up.stages[0].activation_bytes, made_up.stages[1].activation_bytes]
    uneven = arguments(virtual_pipeline_model_parallel_size=2, global_batch_size=6)
    assert unmeasured(uneven).num_microbatches == 3


def test_a_plan_file_is_read_once_more_by_its_digest(files: tuple[Path, Path]) -> None:
    """Other JSON files beside the plan, plans and broken ones too, are no problem."""
    (files[1].parent / "a.json").write_text("{")
    (files[1].parent / "b.json").write_text(files[1].read_text())
    job = load_job(arguments("--optpipe-plan", str(files[1])))
    assert isinstance(job.plan, Plan)


APPLIES: dict[str, dict[str, object]] = {
    "--pipeline-model-parallel-size 1": {"pipeline_model_parallel_size": 1},
    "--transformer-impl transformer_engine": {"transformer_impl": "transformer_engine"},
    "--rampup-batch-size, --step-batch-size-schedule or --decrease-batch-size-if-needed": {
        "rampup_batch_size": [2, 2, 8]
    },
    "--context-parallel-size above 1": {"context_parallel_size": 2},
    "--hybrid-context-parallel": {"hybrid_context_parallel": True},
    "variable sequence lengths": {"variable_seq_lengths": True},
    "--sft and packed sequences": {"sft": True},
    "--num-experts": {"num_experts": 4},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--delay-wgrad-compute": {"delay_wgrad_compute": True},
    "--defer-embedding-wgrad-compute": {"defer_embedding_wgrad_compute": True},
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "CUDA graphs (--cuda-graph-impl)": {"cuda_graph_impl": "local"},
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "--fine-grained-activation-offloading": {"fine_grained_activation_offloading": True},
    "--moe-paged-stash": {"moe_paged_stash": True},
    "--num-microbatches-with-partial-activation-checkpoints": {
        "num_microbatches_with_partial_activation_checkpoints": 2
    },
    "--distribute-saved-activations": {"distribute_saved_activations": True},
    "Megatron FSDP or torch FSDP2": {"use_torch_fsdp2": True},
    "--tensor-parallel-num-weight-shards (weight rematerialisation)": {"gtp_weight_remat_size": 2},
    "--inprocess-restart": {"inprocess_restart": True},
    "--yaml-cfg": {"yaml_cfg": "job.yaml"},
    "reinforcement learning (--perform-rl-step)": {"perform_rl_step": True},
    "distillation and quantisation by ModelOpt": {"modelopt_enabled": True},
}
"""What makes each row of the table apply."""


def test_every_row_of_the_table_applies_to_its_job_alone() -> None:
    assert set(APPLIES) == {row.name for row in CONFLICTS}
    for row in CONFLICTS:
        assert not row.applies(arguments()), row.name
        hit = [other.name for other in CONFLICTS if other.applies(arguments(**APPLIES[row.name]))]
        assert hit == [row.name]
        assert row.reason
        assert row.remedy
        assert "\n" not in row.message()


def test_the_docs_show_every_row() -> None:
    text = render_markdown()
    assert text.count("\n") == len(CONFLICTS) + 2
    assert "| `--num-experts` |" in text
    odd = Conflict("a | b", lambda _: True, "why", "what")
    assert "a \\| b" in render_markdown([odd])


@needs_megatron
@pytest.mark.parametrize("version", ["0.18.1", "0.20.0rc1", "1.0", "", "0.19"])
def test_other_versions_of_megatron(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_optpipe.megatron.compat.megatron_version", lambda: version)
    conflict = first_conflict(arguments())
    if version == "0.19":
        assert conflict is None
    else:
        assert conflict is not None
        assert re.search(r"made for the 0\.19 line", conflict.message())


@needs_megatron
def test_a_refused_job_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "optpipe")
    plan = str(tmp_path / "no-such-plan.json")
    ended = train(2, *flags, "--optpipe-plan", plan)
    assert ended.returncode != 0
    assert "rank0]: Traceback" not in ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("optpipe: ")]
    assert len([line for line in lines if plan in line]) == 1
