"""One rank's executor with everything it needs, built once and run every iteration."""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from megatron_optpipe.core.problem import Problem
from megatron_optpipe.core.program import Program
from megatron_optpipe.megatron.handlers import ChunkMap, Iteration, StageHandlers, adjacent_pairs
from megatron_optpipe.megatron.wgrad import WeightGradSplit, weights_used_twice
from megatron_optpipe.runtime.abort import Abort, StoreAbort
from megatron_optpipe.runtime.executor import Executor
from megatron_optpipe.runtime.group_transport import GroupTransport, MessageSpec
from megatron_optpipe.runtime.host_pool import HostPool, pin_exactly
from megatron_optpipe.runtime.lanes import Lanes
from megatron_optpipe.runtime.recorder import Recorder
from megatron_optpipe.runtime.store import ActivationStore
from megatron_optpipe.runtime.thread_lanes import ThreadLanes
from megatron_optpipe.runtime.turns import StoreTurns, awaited_elsewhere, takes_turns

__all__ = ["Engine", "Rank", "own_store"]

_ENGINES = itertools.count()
"""Numbers the engines of a process: each has keys of its own in the job's store."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What engines of one process share."""

    pp_group: Any
    torch_device: torch.device
    abort: Abort

    @classmethod
    def here(cls, pp_group: Any) -> Rank:
        """This process: its pipeline group, its device, and an abort hub of the whole job."""
        world = torch.distributed
        abort = StoreAbort(own_store("optpipe/abort"), world.get_rank())
        # Its thread must not be inside the store when the interpreter goes away.
        atexit.register(abort.close)
        return cls(pp_group, _torch_device(), abort)


@runtime_checkable
class ReadsLater(Protocol):
    """A recorder whose times are known only after the device has caught up."""

    def read(self) -> None:
        """Wait for the device and read the times."""


class Engine:
    """The executor of one program (training, or evaluation for one microbatch count).

    Args:
        fuse: run a B that its own W follows at once as one backward.
        store: the activation store to use (a measuring one while profiling).
    """

    def __init__(
        self,
        problem: Problem,
        programs: Sequence[Program],
        spec: MessageSpec,
        model: Sequence[torch.nn.Module],
        rank: Rank,
        *,
        fuse: bool = False,
        store: ActivationStore | None = None,
    ) -> None:
        program = programs[rank.pp_group.rank()]
        self.device = program.device
        self.recorder = _recorder(self.device, rank)
        self.store = store or make_store(rank.torch_device, model)
        self.lanes = _lanes(programs, rank, self.recorder)
        atexit.register(self.lanes.close)
        chunks = ChunkMap(problem.stages_on(self.device), problem.num_stages)
        self._handlers = StageHandlers(
            chunks,
            WeightGradSplit(weights_used_twice(model)),
            self.store,
            adjacent_pairs(program) if fuse else frozenset(),
        )
        transport = GroupTransport(
            self.device,
            torch.distributed.get_process_group_ranks(rank.pp_group),
            lambda _: spec,
            group=rank.pp_group,
            torch_device=rank.torch_device,
        )
        rank.abort.on_fault(transport.interrupt)
        transport.warm_up(programs)
        self._executor = Executor(
            program, self._handlers, transport, self.lanes, self.store, self.recorder, rank.abort
        )
        self.started_s = 0.0
        """``perf_counter`` at the start of the last iteration."""

    def run(self, iteration: Iteration) -> None:
        """Run one iteration. Raises ``RuntimeFault``."""
        self._handlers.begin(iteration)
        self.store.start()
        self.started_s = time.perf_counter()
        self.recorder.start(self.started_s)
        self._executor.run()
        self.recorder.peak_bytes = self.store.peak_bytes
        self.recorder.moved_bytes = self.store.moved_bytes

    def read_times(self) -> None:
        """Make ``recorder.times_ms`` complete (on CUDA: waits for the device)."""
        if isinstance(self.recorder, ReadsLater):
            self.recorder.read()


def make_store(
    device: torch.device,
    model: Sequence[torch.nn.Module],
    kind: type[ActivationStore] = ActivationStore,
) -> ActivationStore:
    """An activation store that knows what must stay: parameters, and the buffers they lie in."""
    pool = HostPool(pin=pin_exactly) if device.type == "cuda" else HostPool()
    parameters = [p for chunk in model for p in chunk.parameters()]
    # (data parallelism has an attribute `buffers` of its own)
    buffers = [b for chunk in model for b in torch.nn.Module.buffers(chunk)]
    return kind(device, pool=pool, parameters=[*parameters, *buffers], graph_ends_in_b=True)


def own_store(prefix: str) -> Any:
    """A connection of our own to the store that the job's process group was made with."""
    c10d = torch.distributed.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store().clone())


def _torch_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _recorder(device: int, rank: Rank) -> Recorder:
    if rank.torch_device.type == "cuda":
        from megatron_optpipe.runtime.cuda_recorder import CudaRecorder

        return CudaRecorder(device)
    return Recorder(device)


def _lanes(programs: Sequence[Program], rank: Rank, recorder: Recorder) -> Lanes:
    device = rank.pp_group.rank()
    awaited = awaited_elsewhere(programs, device)
    ranks = torch.distributed.get_process_group_ranks(rank.pp_group)
    # Every rank makes its engines in the same order, so they agree on the number.
    keys = f"optpipe/turns/{ranks[0]}/{next(_ENGINES)}"
    turns = StoreTurns(lambda: own_store(keys), awaited, rank.abort)
    if rank.torch_device.type == "cuda":
        from megatron_optpipe.runtime.cuda_lanes import CudaLanes

        shared = turns if takes_turns(programs, device) else None
        return CudaLanes(device, abort=rank.abort, recorder=recorder, turns=shared)
    return ThreadLanes(device, abort=rank.abort, recorder=recorder, turns=turns)
