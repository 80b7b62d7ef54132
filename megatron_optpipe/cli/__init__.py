"""The command line, ``optpipe``. Importing it is cheap: no torch, scipy or matplotlib.

Each command lives in its own file and imports what it needs when it runs.
"""

from __future__ import annotations

from megatron_optpipe.cli.app import main

__all__ = ["main"]
