"""Device queries: the CPU answers where a script asks for its GPU."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

import torch

from megatron_optpipe.megatron.replacements import Replacements

CPU = torch.device("cpu")

#: Packages that must hear the truth from ``torch.cuda.is_available``: torch itself (it would leave
#: its CPU paths) and this project (its lanes choose threads or streams by it).
_HEAR_THE_TRUTH = ("torch", "megatron_optpipe")

#: Compute capability that the stand-in claims: high enough for Megatron to ask for no workaround.
_CAPABILITY = (9, 0)


def names_cuda(device: Any) -> bool:
    """Whether a device argument means a CUDA device: ``"cuda:1"``, a ``torch.device``, an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def _asked_by_script() -> bool:
    """Whether the code two frames up is the script's own (or Megatron's), not torch's or ours."""
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.split(".", 1)[0] not in _HEAR_THE_TRUTH


def _memory_bytes() -> tuple[int, int]:
    """Free and total memory of this machine in bytes, in the place of the GPU's."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


class _NoDevice(contextlib.AbstractContextManager[None]):
    """``with torch.cuda.device(...)`` with nothing to switch."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        return None


def stand_in_device(book: Replacements) -> None:
    """Let ``torch.cuda`` report one device for each local process, and accept being set to it."""
    cuda = torch.cuda
    truly_available, true_count = cuda.is_available, cuda.device_count

    def is_available() -> bool:
        return True if _asked_by_script() else truly_available()

    def device_count() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _asked_by_script() else true_count()

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="cpu",
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=_memory_bytes()[1],
            multi_processor_count=os.cpu_count() or 1,
        )

    def answer(value: Any) -> Any:
        return lambda *_args, **_kwargs: value

    book.put(cuda, "is_available", is_available)
    book.put(cuda, "device_count", device_count)
    book.put(cuda, "get_device_properties", get_device_properties)
    book.put(cuda, "mem_get_info", lambda *_args, **_kwargs: _memory_bytes())
    book.put(cuda, "device", _NoDevice)
    fixed: dict[str, Any] = {
        "current_device": 0,
        "set_device": None,
        "get_device_capability": _CAPABILITY,
        "get_device_name": "cpu",
        "is_current_stream_capturing": False,
        "check_error": None,
        # Sensors that Megatron may log; 0 says that nobody measured.
        "device_memory_used": 0,
        "utilization": 0,
        "temperature": 0,
        "power_draw": 0,
        "clock_rate": 0,
        "_sleep": None,
    }
    for name, value in fixed.items():
        book.put(cuda, name, answer(value))
    for name in ("range_push", "range_pop", "mark"):
        book.put(cuda.nvtx, name, answer(0))
