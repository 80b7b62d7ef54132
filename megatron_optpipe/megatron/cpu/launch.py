"""``python -m megatron_optpipe.cpu SCRIPT ARGS...``: run a script with the stand-in in place."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.megatron.cpu import CPU_FLAGS, install

USAGE = f"""\
usage: torchrun --nproc-per-node N -m megatron_optpipe.cpu SCRIPT ARGS...
       torchrun --nproc-per-node N -m megatron_optpipe.cpu -m MODULE ARGS...

Runs an unmodified Megatron script on the CPU, over gloo. Megatron needs these arguments with it:
  {" ".join(CPU_FLAGS)}
Environment set before torch is imported, where you did not set it: TORCHDYNAMO_DISABLE=1 (compiled
functions are bound at import, before any flag is read), CUDA_DEVICE_MAX_CONNECTIONS=1,
OMP_NUM_THREADS=1.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the script named by ``argv`` (default: the command line) as ``__main__``.

    Returns 0 after it, or 2 for a wrong command line, with one line that says what is wrong.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    as_module = words[0] == "-m"
    if as_module:
        words = words[1:]
    try:
        if not words:
            raise OptPipeError("-m: a module's name must follow (-m MODULE ARGS...)")
        if not as_module and not Path(words[0]).is_file():
            raise OptPipeError(f"{words[0]}: no such script; name a Python file, or -m MODULE")
        if not as_module:
            # Python puts a script's own folder first on the path; so do we, and before Megatron
            # is looked for, because a checkout's script means the checkout's Megatron.
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
        install()
    except OptPipeError as error:
        print(f"megatron_optpipe.cpu: {error}", file=sys.stderr)
        return 2
    sys.argv = words
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0
