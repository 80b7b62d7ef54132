"""``python -m megatron_optpipe.cli`` is the same as ``optpipe``."""

import sys

from megatron_optpipe.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
