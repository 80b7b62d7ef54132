"""The activation store: what leaves, what comes back, and whose bytes are counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_optpipe.core import Op
from megatron_optpipe.runtime.store import ActivationStore
from tests.runtime.steps import carry_out

F, B, O, R = (Op(kind, 0, 0) for kind in "FBOR")  # noqa: E741


class Keep(torch.autograd.Function):
    """Saves tensors and hands them out again in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, out: list[Tensor], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.out = out
        ctx.count = len(saved)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.out.extend(ctx.saved_tensors)
        return (grads[0], None, *([None] * ctx.count))


class Round:
    """Tensors saved in F; ``back()`` is what B finds."""

    def __init__(self, store: ActivationStore, *tensors: Tensor) -> None:
        self.store = store
        self.out: list[Tensor] = []
        with store.saving(F):
            self.root = Keep.apply(torch.zeros((), requires_grad=True), self.out, *tensors)

    def back(self) -> list[Tensor]:
        with self.store.using(B):
            self.root.backward()
        return self.out


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def there_and_back(store: ActivationStore) -> None:
    carry_out(store.offload(O))
    carry_out(store.reload(R))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.complex64],
)
def test_every_bit_comes_back(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    before = bits(tensor)
    store = ActivationStore()
    saved = Round(store, tensor)
    del tensor, raw
    there_and_back(store)
    (back,) = saved.back()
    assert back.dtype == dtype
    assert bits(back) == before


def test_nan_payloads_come_back() -> None:
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, 0x7FFFFFFF] * 256).to(torch.int32)
    tensor = patterns.view(torch.float32)
    assert tensor.isnan().all()
    saved = Round(store := ActivationStore(), tensor)
    there_and_back(store)
    assert saved.back()[0].view(torch.int32).tolist() == patterns.tolist()


def test_a_shared_storage_moves_once_and_comes_back_shared() -> None:
    base = torch.arange(4096.0)
    views = [base, base[100:200], base.view(64, 64).t(), base[::2], base[5:6].expand(7, 1)]
    wanted = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    offsets = [view.storage_offset() for view in views]
    store = ActivationStore()
    saved = Round(store, *views)
    del views, base
    there_and_back(store)
    assert store.moved_bytes == 4096 * 4
    back = saved.back()
    assert all(torch.equal(a, b) for a, b in zip(back, wanted))
    assert [view.stride() for view in back] == strides
    assert [view.storage_offset() for view in back] == offsets
    assert len({view.untyped_storage().data_ptr() for view in back}) == 1
    back[0][150] = -1.0
    assert back[1][50] == -1.0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_views_come_back(data: st.DataObject) -> None:
    base = torch.arange(data.draw(st.integers(600, 2000)), dtype=torch.float32)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        offset = data.draw(st.integers(0, 99))
        rows, columns = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
        strides = (data.draw(st.integers(0, 70)), data.draw(st.integers(0, 9)))
        views.append(torch.as_strided(base, (rows, columns), strides, offset))
    wanted = [view.clone() for view in views]
    strides_before = [view.stride() for view in views]
    store = ActivationStore(min_bytes=1)
    saved = Round(store, *views)
    there_and_back(store)
    back = saved.back()
    assert store.moved_bytes == base.nbytes
    for one, two, stride in zip(back, wanted, strides_before):
        assert torch.equal(one, two)
        assert one.stride() == stride


def test_what_has_no_bytes_or_few_stays() -> None:
    empty, small = torch.empty(0, 5), torch.arange(4.0)
    store = ActivationStore()
    saved = Round(store, empty, small)
    there_and_back(store)
    back = saved.back()
    assert store.moved_bytes == 0
    assert back[0].shape == (0, 5)
    assert back[1].data_ptr() == small.data_ptr()


def test_parameters_and_their_views_never_leave() -> None:
    flat = torch.randn(64 * 64)
    weight = nn.Parameter(flat.view(64, 64))
    buffer = torch.randn(64, 64)
    store = ActivationStore(parameters=[weight, buffer])
    saved = Round(store, weight, weight.t(), flat[64:], buffer[3], weight.detach())
    carry_out(store.offload(O))
    assert store.moved_bytes == 0
    carry_out(store.reload(R))
    back = saved.back()
    # (autograd makes a new tensor around what a hook returns: the same memory, no attributes)
    assert back[0].data_ptr() == weight.data_ptr()
    assert back[0].requires_grad
    assert back[1].data_ptr() == weight.data_ptr()
    assert back[3].data_ptr() == buffer[3].data_ptr()
    assert store.peak_bytes == 0


class Scaled(Tensor):
    """An int8 tensor with a scale, in the manner of FP8 tensors: no storage of its own."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], ctx: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data8, args[0].scale)
        raise NotImplementedError(str(func))


def test_a_wrapper_moves_what_it_wraps() -> None:
    data = torch.randint(-128, 128, (4096,), dtype=torch.int8)
    wrapped = Scaled(data, torch.tensor([0.5]))
    wanted = data.tolist()
    store = ActivationStore()
    saved = Round(store, wrapped)
    del data, wrapped
    carry_out(store.offload(O))
    assert store.moved_bytes == store.freed_bytes == 4096
    carry_out(store.reload(R))
    (back,) = saved.back()
    assert isinstance(back, Scaled)
    assert back.data8.tolist() == wanted
    assert back.scale.tolist() == [0.5]


def test_resident_bytes_are_those_of_living_storages() -> None:
    store = ActivationStore()
    first, second = torch.zeros(1024), torch.zeros(2048)
    saved = Round(store, first, first[10:], second)
    assert store.resident_bytes == 12288
    del first, second
    carry_out(store.offload(O))
    assert store.resident_bytes == 0
    assert store.freed_bytes == store.moved_bytes == 12288
    carry_out(store.reload(R))
    assert store.resident_bytes == 12288
    back = saved.back()
    del saved.root
    assert store.resident_bytes == 12288  # the test holds them, as a W would
    del back[2], back[1]
    assert store.resident_bytes == 4096
    back.clear()
    assert store.resident_bytes == 0
    assert store.peak_bytes == 12288
    store.start()
    assert store.peak_bytes == store.moved_bytes == store.freed_bytes == 0


def test_moved_is_not_freed_while_somebody_holds_on() -> None:
    store = ActivationStore()
    tensor = torch.zeros(1024)
    Round(store, tensor, torch.ones(1024))
    carry_out(store.offload(O))
    assert store.moved_bytes == 8192
    assert store.freed_bytes == 4096
    assert store.resident_bytes == 4096


def test_what_w_keeps_is_counted_once() -> None:
    store = ActivationStore()
    saved = Round(store, torch.zeros(1024))
    (held,) = saved.back()
    grad = torch.ones(512)
    store.count([held, grad, grad[5:]])
    del saved.root
    saved.out.clear()
    assert store.resident_bytes == 4096 + 2048
    del held, grad
    assert store.resident_bytes == 0


def test_use_without_reload_is_refused() -> None:
    store = ActivationStore()
    saved = Round(store, torch.zeros(1024))
    carry_out(store.offload(O))
    with pytest.raises(RuntimeError, match=r"B\(0,0\) needs activations that are on the host"):
        saved.back()
    with pytest.raises(RuntimeError, match=r"F\(0,0\) were used while on the host"):
        saved.root.backward()


def test_transfers_out_of_order_are_refused() -> None:
    store = ActivationStore()
    with pytest.raises(RuntimeError, match=r"O\(0,0\): nothing was saved for it"):
        store.offload(O).allocate()
    with pytest.raises(RuntimeError, match=r"R\(0,0\): nothing is on the host"):
        store.reload(R).allocate()


def test_what_was_emptied_to_be_computed_again_stays() -> None:
    """Megatron's recomputation of a norm's output fills the very storage that it emptied."""
    store = ActivationStore()
    emptied, plain = torch.randn(2048), torch.randn(1024)
    wanted = emptied.clone()
    saved = Round(store, emptied, plain)
    emptied.untyped_storage().resize_(0)
    there_and_back(store)
    assert store.moved_bytes == 1024 * 4
    emptied.untyped_storage().resize_(2048 * 4)
    emptied.untyped_storage().copy_(wanted.untyped_storage())
    again, other = saved.back()
    assert torch.equal(again, wanted)
    assert torch.equal(other, plain)


@pytest.mark.parametrize("moved", [False, True])
def test_a_write_in_place_is_noticed(moved: bool) -> None:
    """With hooks autograd does not look, and a copy would hide it."""
    store = ActivationStore()
    x = torch.randn(1024, requires_grad=True)
    with store.saving(F):
        y = torch.exp(x)
        loss = y.sum()
    with torch.no_grad():
        y.add_(1.0)
    if moved:
        there_and_back(store)
    with pytest.raises(RuntimeError, match=r"F\(0,0\) saved for backward was written in place"):
        loss.backward()


def test_saved_outputs_make_no_cycles() -> None:
    store = ActivationStore()
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(1024, requires_grad=True)
        with store.saving(F):
            y = torch.exp(torch.tanh(x))  # both save their outputs
        del y
        with store.using(B):
            pass
        del x
        assert store.resident_bytes == 0
    finally:
        gc.enable()


def layer(width: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(2 * width, width),
        nn.Softmax(dim=-1),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
    )


@pytest.mark.parametrize("moved", [False, True])
def test_gradients_are_those_without_a_store(moved: bool) -> None:
    plain, stored = layer(64), layer(64)
    x = torch.randn(32, 64)
    ends = []
    for module, store in ((plain, None), (stored, ActivationStore())):
        torch.manual_seed(11)
        leaf = x.clone().requires_grad_()
        if store is None:
            module(leaf).square().sum().backward()
        else:
            with store.saving(F):
                loss = module(leaf).square().sum()
            if moved:
                there_and_back(store)
                assert store.moved_bytes > 4 * leaf.nbytes
            with store.using(B):
                loss.backward()
        assert leaf.grad is not None
        ends.append([leaf.grad, *(p.grad for p in module.parameters())])
    for one, two in zip(*ends):
        assert torch.equal(one, two)
