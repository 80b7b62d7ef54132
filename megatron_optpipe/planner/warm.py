"""Compiles the list scheduler once, so that plans made later in this account start compiled.

    python -m megatron_optpipe.planner.warm

Needs numba (the extra ``fast``); takes some 20 s. Without it the planner runs as plain Python: the
same schedules from the same keys, some fifty times fewer of them in the same time.
"""

from __future__ import annotations

import sys
import time

from megatron_optpipe.planner.listsched import compiled_for


def main() -> int:
    """Compile, say what was done; 1 without numba."""
    began = time.monotonic()
    if not compiled_for(float("inf")):
        print("numba is not installed or does not work here: the planner runs as plain Python")
        return 1
    print(f"list scheduler compiled or loaded in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
