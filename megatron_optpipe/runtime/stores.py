"""Torch's key-value stores, in one place: who serves, who connects, which one a group has.

A thread that blocks in a store holds its connection, so every thread that may block takes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

JOIN_S = 60.0
"""How long a process waits for the server, or for a key that another one sets."""

LOOPBACK = "127.0.0.1"


def serve(timeout_s: float = JOIN_S) -> tuple[Store, int]:
    """Serve a store on a free port of the loopback interface; the store and the port."""
    server = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return cast(Store, server), int(server.port)


def connect(port: int, host: str = LOOPBACK, timeout_s: float = JOIN_S) -> Store:
    """A connection of its own to a served store."""
    return cast(
        Store,
        dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timedelta(seconds=timeout_s)
        ),
    )


def group_connections(group: dist.ProcessGroup, name: str) -> Callable[[], Store]:
    """Makes connections to the store that ``group`` was set up with, keys under ``name``."""
    base = group.get_group_store()

    def connection() -> Store:
        return PrefixStore(name, base.clone())

    return connection


def under(name: str, store: Store) -> Store:
    """The same store with all keys under ``name``."""
    return PrefixStore(name, store)
