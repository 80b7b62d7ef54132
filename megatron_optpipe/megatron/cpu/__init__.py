"""The CPU stand-in: an unmodified Megatron script on a machine without a GPU, over gloo.

It replaces attributes of torch (and one function of Megatron, see ``helpers``) before the script
starts, and edits no file. ``install`` does it, ``launch.main`` is ``python -m
megatron_optpipe.cpu``. What it cannot show: overlap, CUDA's own numerics, and a missing wait, for
streams here are always done.
"""

from __future__ import annotations

import os
import sys

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.megatron.replacements import Replacements

#: What Megatron must be told as well: no NCCL, no Transformer Engine, no fused CUDA kernels.
CPU_FLAGS = (
    "--distributed-backend",
    "gloo",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
)

#: Environment that must stand before torch is imported. ``torch.compile`` is bound when
#: megatron.core is imported, so Megatron's own ``--disable-jit-fuser`` comes too late; compiling
#: costs some ten seconds a process and changes the draws of dropout. Megatron asserts on
#: ``CUDA_DEVICE_MAX_CONNECTIONS`` with tensor parallelism. A value that the user set is kept.
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
}


def prepare_environment() -> None:
    """Set ``ENVIRONMENT`` where the user did not.

    Raises:
        OptPipeError: torch is already imported and would no longer notice.
    """
    if "torch" in sys.modules and "TORCHDYNAMO_DISABLE" not in os.environ:
        raise OptPipeError(
            "torch is already imported: the CPU stand-in must come first "
            "(start with python -m megatron_optpipe.cpu, or set TORCHDYNAMO_DISABLE=1)"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def install() -> Replacements:
    """Put the stand-in in place and return the book of what was replaced (``undo`` takes it back).

    Raises:
        OptPipeError: torch was imported before without ``TORCHDYNAMO_DISABLE``.
    """
    prepare_environment()
    from megatron_optpipe.megatron.cpu.absent import hide_gpu_packages
    from megatron_optpipe.megatron.cpu.device import stand_in_device
    from megatron_optpipe.megatron.cpu.loader import stand_in_loader
    from megatron_optpipe.megatron.cpu.rng import stand_in_rng
    from megatron_optpipe.megatron.cpu.streams import stand_in_streams
    from megatron_optpipe.megatron.cpu.tensors import stand_in_factories, stand_in_methods
    from megatron_optpipe.megatron.helpers import skip_helper_build

    book = Replacements()
    stand_in_device(book)
    stand_in_streams(book)
    stand_in_rng(book)
    stand_in_factories(book)
    stand_in_methods(book)
    stand_in_loader(book)
    hide_gpu_packages(book)
    skip_helper_build(book)
    return book
