"""Ranks as processes over gloo, for what threads cannot show."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_optpipe.runtime.rehearse.launch import PRELOAD
from megatron_optpipe.runtime.stores import connect, serve, under


def run_ranks(world: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``body(rank, *arguments)`` in ``world`` processes of one gloo group; their results.

    A process that raises gives the exception's text.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    server, port = serve()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world, port, theirs, body, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for pipe in pipes:
            assert pipe.poll(60.0), "a rank did not end within 60 s"
            results.append(pipe.recv())
        return results
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
        del server


def _rank(
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            store=under("gloo", connect(port)),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        result = body(rank, *arguments)
    except Exception as failure:
        result = f"{type(failure).__name__}: {failure}"
        if not str(failure):
            result += traceback.format_exc()
    pipe.send(result)
    pipe.close()
    os._exit(0)
