"""Which problem and which plan this job runs: from files, or made at start-up by rank 0.

``load_job`` reads and checks files before anything is built (every rank, no communication);
``settle`` gives every rank the same plan bytes, checked on that rank, once ranks can talk.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_optpipe.core.check import require_valid
from megatron_optpipe.core.errors import OptPipeError, PlanError
from megatron_optpipe.core.plan import Plan, load_plan
from megatron_optpipe.core.problem import Device, Problem, Stage, load_problem
from megatron_optpipe.core.timing import summarize, time_orders
from megatron_optpipe.megatron.arguments import memory_limit_bytes, planner_time_limit_s
from megatron_optpipe.units import format_bytes

__all__ = ["Job", "JobShape", "load_job", "make_plan_for", "settle", "shape_of", "unmeasured"]

BYTES_PER_TOKEN_CHANNEL = 34
"""Activation bytes of a transformer layer a token and channel in 16 bit (arXiv 2205.05198, eq. 2,
without the attention term). Only an estimate until the job has been measured."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """What of a Megatron job a plan must fit."""

    num_devices: int
    """Pipeline ranks."""
    num_chunks: int
    """Model chunks a rank (virtual pipeline size)."""
    num_microbatches: int

    @property
    def stage_device(self) -> tuple[int, ...]:
        """Megatron's placement: chunk after chunk over all ranks."""
        return tuple(range(self.num_devices)) * self.num_chunks


@dataclass(frozen=True, slots=True)
class Job:
    """A problem that fits the job, and the plan for it where there is one already."""

    problem: Problem
    plan: Plan | None = None
    measured: bool = True
    """False: the times and bytes of the problem are an estimate."""


def shape_of(args: Namespace) -> JobShape:
    """The shape of a job from Megatron's validated arguments."""
    batch, micro = args.global_batch_size, args.micro_batch_size * args.data_parallel_size
    return JobShape(
        num_devices=args.pipeline_model_parallel_size,
        num_chunks=getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        num_microbatches=batch // micro,
    )


def load_job(args: Namespace) -> Job:
    """Read and check the files that the flags name. Raises ``OptPipeError`` (one line)."""
    shape, limit = shape_of(args), memory_limit_bytes(args)
    planner_time_limit_s(args)
    if args.optpipe_write_problem is not None:
        _require_measurable(args)
        problem = unmeasured(args)
        return Job(problem, _classic_plan(problem), measured=False)
    if args.optpipe_plan is not None:
        plan = load_plan(args.optpipe_plan)
        problem, source = _problem_of(plan, args)
        _require_shape(problem, shape, source)
        require_valid(problem, plan)
        _require_within(problem, plan, limit)
        return Job(problem, plan)
    if args.optpipe_problem is not None:
        problem = load_problem(args.optpipe_problem)
        _require_shape(problem, shape, args.optpipe_problem)
        if limit is not None:
            problem = with_memory(problem, limit)
        _require_one_fits(problem)
        return Job(problem)
    if limit is not None:
        raise OptPipeError(
            f"--optpipe-memory-limit {args.optpipe_memory_limit}: a limit in bytes needs measured "
            "bytes; run once with --optpipe-write-problem FILE, then add --optpipe-problem FILE"
        )
    return Job(unmeasured(args), measured=False)


def unmeasured(args: Namespace) -> Problem:
    """A problem of the job's shape with equal times and 1F1B's memory as the limit.

    Its plan has the memory and the order of dependencies right; its clock means nothing.
    """
    shape = shape_of(args)
    num_stages = len(shape.stage_device)
    tokens = args.seq_length * args.micro_batch_size // args.tensor_model_parallel_size
    layers = -(-args.num_layers // num_stages)
    activation = BYTES_PER_TOKEN_CHANNEL * layers * tokens * args.hidden_size
    stage = Stage(1.0, 1.0, 1.0, activation, activation // 2)
    endless = Device(activation * num_stages * shape.num_microbatches)
    problem = Problem(
        num_microbatches=shape.num_microbatches,
        stage_device=shape.stage_device,
        stages=(stage,) * num_stages,
        devices=(endless,) * shape.num_devices,
        links={},
        p2p_ms=0.1,
        name="not measured",
        notes="equal times; the limit of each device is the peak of (interleaved) 1F1B",
    )
    plan = _classic_plan(problem)
    devices = tuple(Device(peak) for peak in summarize(problem, plan).peak_bytes)
    return dataclasses.replace(problem, devices=devices)


def _classic_plan(problem: Problem) -> Plan:
    """(Interleaved) 1F1B with each W right after its B."""
    from megatron_optpipe.planner.orders import gpipe, interleaved, one_f_one_b

    if problem.num_stages == problem.num_devices:
        return time_orders(problem, one_f_one_b(problem), method="1f1b")
    if problem.num_microbatches % problem.num_devices == 0:
        return time_orders(problem, interleaved(problem), method="interleaved")
    return time_orders(problem, gpipe(problem), method="gpipe")


def make_plan_for(job: Job, args: Namespace) -> Plan:
    """The plan of a job: the given one, or one made now. Raises ``OptPipeError``."""
    from megatron_optpipe.planner import PlannerOptions, make_plan

    if job.plan is not None:
        return job.plan
    # Equal made-up times are not worth a search.
    method = args.optpipe_method if job.measured else "greedy"
    options = PlannerOptions(method=method, time_limit_s=planner_time_limit_s(args))
    return make_plan(job.problem, options)


def settle(job: Job, plan_on_rank_0: Callable[[Job], Plan]) -> tuple[Problem, Plan]:
    """Rank 0 plans, all ranks get its bytes and check them; all agree or all raise.

    Raises:
        OptPipeError: planning failed, or a rank refuses the plan; the same on every rank.
    """
    import torch

    world = torch.distributed
    parcel: list[str | None] = [None]
    if world.get_rank() == 0:
        parcel[0] = _packed(job, plan_on_rank_0)
    world.broadcast_object_list(parcel, src=0)
    verdict: str | None = None
    problem: Problem | None = None
    plan: Plan | None = None
    try:
        problem, plan = _unpacked(str(parcel[0]))
        require_valid(problem, plan)
    except OptPipeError as failure:
        verdict = str(failure)
    verdicts: list[str | None] = [None] * world.get_world_size()
    world.all_gather_object(verdicts, verdict)
    for rank, refusal in enumerate(verdicts):
        if refusal is not None:
            raise OptPipeError(refusal if rank == 0 else f"rank {rank}: {refusal}")
    assert problem is not None
    assert plan is not None
    return problem, plan


def with_memory(problem: Problem, limit_bytes: int) -> Problem:
    """The same problem with another memory limit on every device (another digest)."""
    devices = tuple(
        dataclasses.replace(device, memory_bytes=limit_bytes) for device in problem.devices
    )
    return dataclasses.replace(problem, devices=devices)


def _packed(job: Job, plan_on_rank_0: Callable[[Job], Plan]) -> str:
    try:
        plan = plan_on_rank_0(job)
    except OptPipeError as failure:
        return json.dumps({"failure": str(failure)})
    return json.dumps({"problem": job.problem.to_dict(), "plan": plan.to_json()})


def _unpacked(text: str) -> tuple[Problem, Plan]:
    parcel: dict[str, Any] = json.loads(text)
    if "failure" in parcel:
        raise OptPipeError(parcel["failure"])
    problem = Problem.from_dict(parcel["problem"])
    plan = Plan.from_dict(json.loads(parcel["plan"]))
    if plan.problem_sha256 != problem.digest:
        raise PlanError(f"plan for problem {plan.problem_sha256[:12]}, not {problem.digest[:12]}")
    return problem, plan


def _problem_of(plan: Plan, args: Namespace) -> tuple[Problem, str]:
    """The problem of a plan: named by flag, or the file beside the plan whose digest fits."""
    if args.optpipe_problem is not None:
        problem = load_problem(args.optpipe_problem)
        if problem.digest != plan.problem_sha256:
            raise PlanError(
                f"{args.optpipe_plan}: made for problem {plan.problem_sha256[:12]}, but "
                f"{args.optpipe_problem} is {problem.digest[:12]}; plan this problem, or name "
                "the problem of the plan"
            )
        return problem, str(args.optpipe_problem)
    for path in sorted(Path(args.optpipe_plan).absolute().parent.glob("*.json")):
        try:
            problem = load_problem(path)
        except (OptPipeError, OSError):
            continue
        if problem.digest == plan.problem_sha256:
            return problem, str(path)
    raise PlanError(
        f"{args.optpipe_plan}: made for problem {plan.problem_sha256[:12]}, and no file beside it "
        "is that problem; add --optpipe-problem FILE"
    )


def _require_measurable(args: Namespace) -> None:
    if args.optpipe_plan is not None or args.optpipe_problem is not None:
        raise OptPipeError(
            f"--optpipe-write-problem {args.optpipe_write_problem}: measures under a classic order "
            "of its own; leave out --optpipe-plan and --optpipe-problem"
        )
    if args.optpipe_profile_iterations < 1:
        raise OptPipeError(
            f"--optpipe-profile-iterations {args.optpipe_profile_iterations}: must be at least 1"
        )
    needed, given = args.optpipe_profile_iterations + 1, getattr(args, "train_iters", None)
    if given is not None and given < needed:
        raise OptPipeError(
            f"--train-iters {given}: measuring takes {needed} iterations "
            f"(--optpipe-profile-iterations {args.optpipe_profile_iterations} and one to warm up); "
            f"train at least {needed}, or measure fewer"
        )


def _require_shape(problem: Problem, shape: JobShape, source: str) -> None:
    if problem.num_devices != shape.num_devices:
        raise OptPipeError(
            f"{source}: is for {problem.num_devices} pipeline ranks, this job has "
            f"{shape.num_devices}; measure and plan this job, or set "
            f"--pipeline-model-parallel-size {problem.num_devices}"
        )
    if problem.num_stages != len(shape.stage_device):
        chunks = problem.num_stages / problem.num_devices
        raise OptPipeError(
            f"{source}: is for {chunks:g} model chunks a rank, this job has {shape.num_chunks}; "
            "measure and plan this job, or change its virtual pipeline size"
        )
    if problem.stage_device != shape.stage_device:
        raise OptPipeError(
            f"{source}: stage_device is {list(problem.stage_device)}, Megatron places "
            f"{list(shape.stage_device)}; plan that placement"
        )
    if problem.num_microbatches != shape.num_microbatches:
        raise OptPipeError(
            f"{source}: is for {problem.num_microbatches} microbatches, this job has "
            f"{shape.num_microbatches}; measure and plan this job, or change --global-batch-size"
        )


def _require_within(problem: Problem, plan: Plan, limit_bytes: int | None) -> None:
    if limit_bytes is None:
        return
    for device, peak in enumerate(summarize(problem, plan).peak_bytes):
        if peak > limit_bytes:
            raise OptPipeError(
                f"--optpipe-memory-limit {format_bytes(limit_bytes)}: the plan needs "
                f"{format_bytes(peak)} on device {device}; plan again with this limit, or raise it"
            )


def _require_one_fits(problem: Problem) -> None:
    for stage, entry in enumerate(problem.stages):
        device = problem.device_of(stage)
        limit = problem.devices[device].memory_bytes
        needed = entry.activation_bytes + max(0, -entry.backward_frees_bytes)
        if needed > limit:
            raise OptPipeError(
                f"memory limit of device {device} is {format_bytes(limit)}: one microbatch of "
                f"stage {stage} alone needs {format_bytes(needed)}; raise --optpipe-memory-limit "
                "or use a smaller --micro-batch-size"
            )
