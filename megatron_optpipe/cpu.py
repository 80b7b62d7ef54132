"""The name people type: ``torchrun -m megatron_optpipe.cpu SCRIPT ARGS...``.

The work is done in ``megatron_optpipe.megatron.cpu``.
"""

from __future__ import annotations

import sys

from megatron_optpipe.megatron.cpu.launch import main

if __name__ == "__main__":
    sys.exit(main())
