"""When reductions may start: never before the last W of a chunk, and each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed (the extra `megatron`)")

import torch

from megatron_optpipe.megatron.grad_sync import GradSync


class Chunk(torch.nn.Module):
    """A model chunk that notes its switch and its reductions."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log, self.on = name, log, True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def start_grad_sync(self, *_: object) -> None:
        assert self.on, "Megatron reduces with the switch on"
        self.log.append(self.name)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def model(log: list[str]) -> list[Chunk]:
    return [Chunk("0", log), Chunk("1", log)]


def test_each_chunk_is_on_in_its_last_microbatch_only(model: list[Chunk]) -> None:
    sync = GradSync([c.no_sync for c in model], None, model)
    sync.begin()
    assert [c.on for c in model] == [False, False]
    with sync.last_backward(1):
        assert [c.on for c in model] == [False, True]
    assert [c.on for c in model] == [False, False]
    with sync.last_backward(1):  # its last W, later
        assert [c.on for c in model] == [False, True]
    sync.end()
    assert [c.on for c in model] == [True, True]


def test_aligned_reductions_start_when_a_chunk_is_done(model: list[Chunk], log: list[str]) -> None:
    sync = GradSync([c.no_sync for c in model], [c.start_grad_sync for c in model], model)
    sync.begin()
    with sync.last_backward(1):
        assert not model[1].on, "the hooks must not start it"
    sync.chunk_done(1)
    assert log == ["1"]
    sync.end()
    assert log == ["1", "0"]


def test_one_function_for_all_chunks_waits_for_the_end(model: list[Chunk], log: list[str]) -> None:
    @contextlib.contextmanager
    def all_off() -> Iterator[None]:
        with model[0].no_sync(), model[1].no_sync():
            yield

    sync = GradSync(all_off, [c.start_grad_sync for c in model], model)
    sync.begin()
    with sync.last_backward(0):
        assert [c.on for c in model] == [False, False]
    sync.chunk_done(0)
    assert log == []
    sync.end()
    assert log == ["0", "1"]


def test_without_overlap_there_is_nothing_to_switch(model: list[Chunk], log: list[str]) -> None:
    sync = GradSync(None, None, model)
    sync.begin()
    with sync.last_backward(0):
        pass
    sync.chunk_done(0)
    sync.end()
    assert log == []


def test_a_fault_leaves_the_switches_as_they_were(model: list[Chunk]) -> None:
    sync = GradSync([c.no_sync for c in model], None, model)
    sync.begin()
    sync.abandon()
    assert [c.on for c in model] == [True, True]
