"""Our forward-backward function: Megatron's signature outside, the executor of plans inside."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.core.plan import Plan
from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.program import lower
from megatron_optpipe.core.timing import time_orders
from megatron_optpipe.megatron.arguments import memory_limit_bytes
from megatron_optpipe.megatron.compat import first_conflict
from megatron_optpipe.megatron.engine import Engine, Rank, make_store
from megatron_optpipe.megatron.grad_sync import GradSync
from megatron_optpipe.megatron.handlers import Iteration
from megatron_optpipe.megatron.job import load_job, make_plan_for, settle
from megatron_optpipe.megatron.profile import MeasuringStore, Profile
from megatron_optpipe.megatron.report import RunLog
from megatron_optpipe.runtime.group_transport import MessageSpec
from megatron_optpipe.runtime.store import ActivationStore

__all__ = ["PipelineRun"]


class PipelineRun:
    """The forward-backward function of a job: one plan, its engine, and engines for evaluation.

    Called like Megatron's own. What of its arguments cannot be honoured is refused by name.
    """

    def __init__(self, problem: Problem, plan: Plan, args: Namespace) -> None:
        self.problem, self.plan = problem, plan
        self._args = args
        self._rank: Rank | None = None
        self._profile: Profile | None = None
        self._log: RunLog | None = None
        self._engines: dict[tuple[bool, int, MessageSpec], Engine] = {}

    @classmethod
    def start(cls, args: Namespace) -> PipelineRun:
        """Settle on one plan with all ranks. Raises ``OptPipeError``, the same on each of them."""
        conflict = first_conflict(args)  # again: not every way to arguments passes validation
        if conflict is not None:
            raise OptPipeError(conflict.message())
        job = load_job(args)
        problem, plan = settle(job, lambda job: make_plan_for(job, args))
        return cls(problem, plan, args)

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """One iteration; returns what the loss function reported, on the last stage."""
        if adjust_tensor_shapes_fn is not None:
            raise OptPipeError(
                "adjust_tensor_shapes_fn: not honoured by optpipe; use stock Megatron"
            )
        model = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(model[0])
        groups, pp_group = _groups(p2p_communicator, pg_collection)
        self._require_fit(num_microbatches, len(model), pp_group, forward_only)
        shapes = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        spec = MessageSpec(tuple(shapes[0]), config.pipeline_dtype)
        iteration = Iteration(
            forward_step_func=forward_step_func,
            data_iterator=iterators,
            model=model,
            config=config,
            num_microbatches=num_microbatches,
            cp_size=groups.cp.size(),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        if not forward_only:
            iteration.sync = GradSync(config.no_sync_func, config.grad_sync_func, model)
            iteration.sync.begin()
        engine = self._engine(spec, num_microbatches, forward_only, model, pp_group)
        try:
            engine.run(iteration)
        except BaseException:
            if iteration.sync is not None:
                iteration.sync.abandon()
            raise
        if iteration.sync is not None:
            iteration.sync.end()
            self._finalize(iteration, groups, force_all_reduce)
        if timers is not None:
            timers("forward-backward").stop()
        if not forward_only:
            self._observe(engine, spec)
        return iteration.losses

    def _observe(self, engine: Engine, spec: MessageSpec) -> None:
        """After a training iteration: measure and log, where asked for."""
        if self._profile is not None and self._profile.add(engine, spec):
            self._profile = None
        if self._log is not None:
            self._log.add(engine)

    def _finalize(
        self, iteration: Iteration, groups: ProcessGroupCollection, force_all_reduce: bool | None
    ) -> None:
        """Megatron's own end of an iteration: reductions, tied embeddings, token counts."""
        config = iteration.config
        if config.finalize_model_grads_func is None:
            return
        tokens = iteration.num_tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(
            list(iteration.model), tokens, pg_collection=groups, force_all_reduce=force_all_reduce
        )

    def _engine(
        self,
        spec: MessageSpec,
        num_microbatches: int,
        forward_only: bool,
        model: Sequence[torch.nn.Module],
        pp_group: Any,
    ) -> Engine:
        key = (forward_only, num_microbatches, spec)
        if key not in self._engines:
            if self._rank is None:
                self._rank = self._first_use(pp_group)
            if forward_only:
                problem, plan = _forwards(self.problem, num_microbatches)
                programs = lower(problem, plan, kinds=("F",))
                self._engines[key] = Engine(problem, programs, spec, model, self._rank)
            else:
                measuring = self._profile is not None
                kind = MeasuringStore if measuring else ActivationStore
                self._engines[key] = Engine(
                    self.problem,
                    lower(self.problem, self.plan),
                    spec,
                    model,
                    self._rank,
                    fuse=self._args.optpipe_fuse_adjacent_bw and not measuring,
                    store=make_store(self._rank.torch_device, model, kind),
                )
        return self._engines[key]

    def _first_use(self, pp_group: Any) -> Rank:
        args, rank = self._args, Rank.here(pp_group)
        if args.optpipe_write_problem is not None:
            self._profile = Profile(
                self.problem,
                rank,
                Path(args.optpipe_write_problem),
                memory_limit_bytes(args),
                args.optpipe_profile_iterations,
            )
        if args.optpipe_log_dir is not None:
            self._log = RunLog(self.problem, self.plan, args, pp_group)
        return rank

    def _require_fit(
        self, num_microbatches: int, num_chunks: int, pp_group: Any, forward_only: bool
    ) -> None:
        problem = self.problem
        if pp_group.size() != problem.num_devices:
            raise OptPipeError(
                f"plan for {problem.num_devices} pipeline ranks, the group has {pp_group.size()}"
            )
        if num_chunks != problem.num_stages // problem.num_devices:
            raise OptPipeError(
                f"plan for {problem.num_stages // problem.num_devices} model chunks a rank, the "
                f"model has {num_chunks}"
            )
        if not forward_only and num_microbatches != problem.num_microbatches:
            raise OptPipeError(
                f"plan for {problem.num_microbatches} microbatches, this iteration has "
                f"{num_microbatches}; keep the global batch size constant"
            )


def _forwards(problem: Problem, num_microbatches: int) -> tuple[Problem, Plan]:
    """A plan for evaluation: all forwards of a chunk, chunk after chunk, any microbatch count."""
    from megatron_optpipe.planner.orders import gpipe

    problem = dataclasses.replace(problem, num_microbatches=num_microbatches)
    return problem, time_orders(problem, gpipe(problem), method="gpipe", obey_memory=False)


def _groups(p2p_communicator: Any, pg_collection: Any) -> tuple[ProcessGroupCollection, Any]:
    """The process groups of this call: those given, or Megatron's global ones."""
    if p2p_communicator is None and pg_collection is None:
        collection = schedules._build_default_pg_collection()
        return collection, parallel_state.get_pipeline_model_parallel_group()
    if not isinstance(pg_collection, ProcessGroupCollection) or p2p_communicator is None:
        raise OptPipeError(
            "optpipe takes p2p_communicator and pg_collection of one model, both or neither; "
            "for several modules use stock Megatron"
        )
    return pg_collection, p2p_communicator.pp_group
