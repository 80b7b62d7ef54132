"""Host buffers: reused, bounded, and refused with numbers."""

from __future__ import annotations

import pytest
from torch import Tensor

from megatron_optpipe.core import OptPipeError
from megatron_optpipe.runtime.host_pool import HostMemoryError, HostPool
from tests.runtime.steps import Done


def test_a_returned_buffer_is_used_again() -> None:
    pool = HostPool()
    first = pool.take(1000)
    pool.give(first)
    assert pool.take(990) is first
    assert pool.num_buffers == 1
    assert pool.reserved_bytes == 1000


def test_a_much_larger_buffer_is_not_wasted() -> None:
    pool = HostPool()
    large = pool.take(10_000)
    pool.give(large)
    assert pool.take(1000) is not large
    assert pool.reserved_bytes == 11_000


def test_the_smallest_fitting_buffer_is_taken() -> None:
    pool = HostPool()
    buffers = [pool.take(size) for size in (1200, 1000, 1100)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.take(1000) is buffers[1]
    assert pool.take(1000) is buffers[2]


def test_requested_and_reserved_are_told_apart() -> None:
    pool = HostPool()
    one = pool.take(1000)
    two = pool.take(500)
    pool.give(one)
    pool.take(800)
    assert pool.peak_requested_bytes == 1500
    assert pool.reserved_bytes == 1500
    assert two.requested_bytes == 500


def test_the_next_user_gets_the_last_use() -> None:
    pool = HostPool()
    buffer = pool.take(100)
    assert buffer.busy_until is None
    ended = Done()
    pool.give(buffer, ended)
    assert pool.take(100).busy_until is ended


def test_reserved_buffers_serve_later_requests() -> None:
    pool = HostPool()
    pool.reserve(1000, 3)
    assert pool.reserved_bytes == 3000
    taken = [pool.take(1000) for _ in range(3)]
    assert len({id(b) for b in taken}) == 3
    assert pool.num_buffers == 3


def test_reserving_stops_at_the_budget() -> None:
    pool = HostPool(budget_bytes=2500)
    pool.reserve(1000, 5)
    assert pool.reserved_bytes == 2000
    assert pool.peak_requested_bytes == 0


def test_the_budget_is_kept_and_named() -> None:
    pool = HostPool(budget_bytes=2500)
    pool.take(1000)
    pool.take(1000)
    with pytest.raises(HostMemoryError, match="3000 bytes needed, the budget is 2500") as failure:
        pool.take(1000)
    assert isinstance(failure.value, OptPipeError)
    assert "host_memory_bytes" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert pool.reserved_bytes == 2000


def test_failing_to_pin_says_how_much_and_what_to_do() -> None:
    pinned: list[Tensor] = []

    def pin(data: Tensor) -> None:
        if len(pinned) == 2:
            raise RuntimeError("CUDA error: out of memory\nsecond line")
        pinned.append(data)

    pool = HostPool(pin=pin)
    pool.take(1000)
    pool.take(1000)
    with pytest.raises(HostMemoryError) as failure:
        pool.take(1000)
    text = str(failure.value)
    assert "buffer 3 of 1000 bytes" in text
    assert "2000 are reserved" in text
    assert "memlock" in text
    assert "\n" not in text
    assert pool.reserved_bytes == 2000
    assert [data.numel() for data in pinned] == [1000, 1000]
