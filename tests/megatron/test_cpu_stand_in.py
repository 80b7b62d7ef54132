"""The CPU stand-in, part by part, put back after each test."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_optpipe.megatron.cpu.absent import GPU_ONLY, hide_gpu_packages
from megatron_optpipe.megatron.cpu.device import names_cuda, stand_in_device
from megatron_optpipe.megatron.cpu.loader import stand_in_loader
from megatron_optpipe.megatron.cpu.rng import stand_in_rng
from megatron_optpipe.megatron.cpu.streams import stand_in_streams
from megatron_optpipe.megatron.cpu.tensors import stand_in_factories, stand_in_methods
from megatron_optpipe.megatron.replacements import Replacements

CUDA_NAMES = ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)]

PARTS: list[Callable[[Replacements], None]] = [
    stand_in_device,
    stand_in_streams,
    stand_in_rng,
    stand_in_factories,
    stand_in_methods,
    stand_in_loader,
    hide_gpu_packages,
]


@pytest.fixture
def book() -> Iterator[Replacements]:
    book = Replacements()
    yield book
    book.undo()


def ask_as(module: str, expression: str) -> Any:
    """What code of ``module`` gets for ``expression``."""
    space: dict[str, Any] = {"__name__": module, "torch": torch}
    exec(f"def ask():\n    return {expression}", space)
    return space["ask"]()


@pytest.mark.parametrize("device", CUDA_NAMES)
def test_cuda_devices_are_recognised(device: Any) -> None:
    assert names_cuda(device)


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("cpu"), True, "cudax"])
def test_other_devices_are_left_alone(device: Any) -> None:
    assert not names_cuda(device)


@pytest.mark.parametrize("module", ["__main__", "megatron.core.utils", "pretrain_gpt"])
def test_a_script_sees_one_device_for_each_local_rank(
    book: Replacements, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    stand_in_device(book)
    assert ask_as(module, "torch.cuda.is_available()") is True
    assert ask_as(module, "torch.cuda.device_count()") == 4
    assert ask_as(module, "torch.cuda.current_device()") == 0
    assert ask_as(module, "torch.cuda.get_device_properties('cuda:0').major") >= 8
    free_bytes, total_bytes = ask_as(module, "torch.cuda.mem_get_info()")
    assert 0 < free_bytes <= total_bytes


@pytest.mark.parametrize("module", ["torch.utils.data", "megatron_optpipe.runtime.lanes"])
def test_torch_and_this_project_hear_the_truth(book: Replacements, module: str) -> None:
    truth = torch.cuda.is_available(), torch.cuda.device_count()
    stand_in_device(book)
    expression = "(torch.cuda.is_available(), torch.cuda.device_count())"
    assert ask_as(module, expression) == truth


@pytest.mark.parametrize("device", CUDA_NAMES)
def test_tensors_asked_for_on_cuda_are_made_on_the_cpu(book: Replacements, device: Any) -> None:
    stand_in_factories(book)
    like = torch.ones(2, dtype=torch.float64)
    made = [
        torch.zeros(2, 3, device=device),
        torch.empty((2,), device=device, pin_memory=True),
        torch.tensor([1.0], device=device),
        torch.arange(4, device=device),
        torch.randint(0, 9, (2,), device=device),
        torch.full_like(like, 2.0, device=device),
        like.new_zeros(3, device=device),
        like.new_tensor([1], device=device),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[5].dtype == torch.float64
    assert made[5].tolist() == [2.0, 2.0]
    assert torch.empty(1, device="meta").device.type == "meta"


@pytest.mark.parametrize("device", CUDA_NAMES)
def test_moving_to_cuda_stays_on_the_cpu(book: Replacements, device: Any) -> None:
    stand_in_methods(book)
    tensor = torch.arange(3.0)
    assert tensor.to(device) is tensor
    assert tensor.to(device=device, non_blocking=True) is tensor
    assert tensor.to(device, torch.float64).dtype == torch.float64
    assert tensor.cuda(non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    assert torch.nn.Linear(2, 2).to(torch.device("cuda")).weight.device.type == "cpu"


def test_type_names_are_those_of_cuda(book: Replacements) -> None:
    stand_in_methods(book)
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.ones(1).type(torch.float16).dtype == torch.float16


def test_streams_are_always_done(book: Replacements) -> None:
    stand_in_streams(book)
    stream = torch.cuda.Stream(device="cuda", priority=torch.cuda.Stream.priority_range()[1])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(start)
        end.record(stream)
    torch.cuda.synchronize()
    assert stream.query()
    assert stream.record_event().query()
    assert start.elapsed_time(end) >= 0.0
    torch.ones(1).record_stream(stream)


def test_time_to_an_event_never_recorded_is_refused(book: Replacements) -> None:
    stand_in_streams(book)
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_the_cuda_generator_is_the_cpu_generator(book: Replacements) -> None:
    stand_in_rng(book)
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state(device="cuda")
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.set_rng_state(state, device="cuda")
    assert torch.equal(torch.rand(3), first)
    torch.cuda._lazy_call(lambda: torch.cuda.default_generators[0].set_state(state))  # type: ignore[no-untyped-call]
    assert torch.equal(torch.rand(3), first)


def test_a_loader_draws_nothing_from_the_default_generator(book: Replacements) -> None:
    def moves_the_generator() -> bool:
        before = torch.get_rng_state()
        next(iter(DataLoader([1, 2, 3], pin_memory=True)))  # type: ignore[arg-type]
        return not torch.equal(before, torch.get_rng_state())

    assert moves_the_generator(), "torch no longer needs this part of the stand-in"
    stand_in_loader(book)
    assert not moves_the_generator()


def test_a_loaders_own_generator_is_kept(book: Replacements) -> None:
    stand_in_loader(book)
    own = torch.Generator()
    loader = DataLoader([1, 2, 3], generator=own)  # type: ignore[arg-type]
    assert loader.generator is own


@pytest.mark.parametrize("name", GPU_ONLY)
def test_gpu_packages_cannot_be_imported(
    book: Replacements, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    hide_gpu_packages(book)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def test_everything_is_put_back() -> None:
    owners: list[Any] = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx]
    owners += [torch.Tensor, DataLoader]
    before = [dict(vars(owner)) for owner in owners]
    modules = dict(sys.modules)
    book = Replacements()
    for part in PARTS:
        part(book)
    assert [dict(vars(owner)) for owner in owners] != before
    assert "torch.cuda.is_available" in book.names()
    assert "torch.Tensor.to" in book.names()
    book.undo()
    for owner, former in zip(owners, before, strict=True):
        now = dict(vars(owner))
        assert now.keys() == former.keys()
        assert [name for name in now if now[name] is not former[name]] == []
    assert sys.modules == modules


def test_replacements_are_undone_last_first() -> None:
    owner = types.SimpleNamespace(a=1)
    book = Replacements()
    book.put(owner, "a", 2)
    book.put(owner, "a", 3)
    book.put(owner, "b", 4)
    assert (owner.a, owner.b) == (3, 4)
    book.undo()
    assert vars(owner) == {"a": 1}
