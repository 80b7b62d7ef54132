"""Tensors: what is asked for on a CUDA device is made, or stays, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_optpipe.megatron.cpu.device import CPU, names_cuda
from megatron_optpipe.megatron.replacements import Replacements

#: Functions of ``torch`` that take ``device=`` (some of them ``pin_memory=``) and make a tensor.
_FACTORIES = (
    "arange",
    "asarray",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")

#: What ``Tensor.type()`` must say: Megatron's optimizers sort parameters by these names.
_TYPE_PREFIX, _CUDA_TYPE_PREFIX = "torch.", "torch.cuda."


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with a CUDA device turned into the CPU and without pinned memory."""
    if names_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _making_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **_on_cpu(kwargs))

    return make_on_cpu


def stand_in_factories(book: Replacements) -> None:
    """Wrap the functions that make tensors."""
    for name in _FACTORIES:
        book.put(torch, name, _making_on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        book.put(torch.Tensor, name, _making_on_cpu(getattr(torch.Tensor, name)))


def stand_in_methods(book: Replacements) -> None:
    """Wrap ``Tensor.to``, ``.cuda``, ``.type`` and ``.pin_memory``.

    There is no device boundary here, so ``.cuda()`` and ``.pin_memory()`` return the tensor
    itself, where CUDA would have made a copy.
    """
    true_to, true_type = torch.Tensor.to, torch.Tensor.type

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and names_cuda(args[0]):
            args = (CPU, *args[1:])
        result: torch.Tensor = true_to(tensor, *args, **_on_cpu(kwargs))
        return result

    def type_(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace(_CUDA_TYPE_PREFIX, _TYPE_PREFIX)
            return true_type(tensor, dtype, *args, **kwargs)
        return true_type(tensor).replace(_TYPE_PREFIX, _CUDA_TYPE_PREFIX)

    book.put(torch.Tensor, "to", to)
    book.put(torch.Tensor, "type", type_)
    for name in ("cuda", "pin_memory"):
        book.put(torch.Tensor, name, lambda tensor, *_args, **_kwargs: tensor)
