"""Writes docs/bench-planner.md from what ``bench.peers`` and ``bench.claims`` measured.

python -m bench.page --peers ROWS.json... --claims CLAIMS.json... [-o docs/bench-planner.md]
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path

from bench import claims, peers
from bench.claims import Result
from bench.peers import Row

HEAD = """\
# The planner against the peers

Figures of the peers: `bench/data/peers.json`, made with their own generators and timed in one
simulator (unit of time: F of a device for one microbatch; unit of memory: its activations; a level
is the memory of a device). Ours: `python -m bench.peers`, each plan passed by the checker. All
times are of the timing model; nothing here ran on a GPU.

* `t`: the one-way transfer of an activation takes t times its F + B + W; devices 2i and 2i+1 share
  their links.
* `placement`: chunks on a device, `v` zigzag; the best of 4, 4v, 2, 2v, as a user may choose.
  `bound` is proven for the placement with the lowest one. `s` is the planning time of the slowest
  of the four, two plans at a time on two cores. Time limits: 4 s for 4 devices, 8 s for 8, 12 s
  for 16x32 and 15 s for 16x64; where the bound is reached planning ends before.
* *idle ratio*: (makespan - work of a device), ours over the best peer's.
* Where the best peer at a level recomputes activations, ours answers with offloading at t = 0.5 and
  the row says so: optpipe does not plan recomputation.
"""

OTHER = """\
## Other claims

`python -m bench.claims`, F:B:W = 1:1:1, hop 0.1, links of their own at the t named. *Without
memory* is the bound that ignores memory limits and links, *above that* the distance of the plan
from it; `bound` is the best proven one. GB: peak of the planning process.

`profiled` takes the measured times of the zero-bubble paper (2401.10241, table of bubble rates):
ZB's figure is work / (1 - its bubble rate), the span of one device, since its optimizer step does
not wait for all devices; ours is the makespan of all. Where ours equals the bound nothing that
ends on all devices is shorter.
"""


def _size_table(rows: list[Row]) -> str:
    lines = [f"## {rows[0].size}", "", peers.HEADER]
    lines += [peers.render(row) for row in rows]
    return "\n".join([*lines, "", peers.verdict(rows) + ".", ""])


def page(rows: list[Row], found: list[Result]) -> str:
    """The whole page."""
    parts = [HEAD, peers.verdict(rows) + " (all sizes).", ""]
    parts += [_size_table(list(group)) for _, group in groupby(rows, lambda row: row.size)]
    parts += [OTHER, claims.HEADER, *(claims.render(result) for result in found)]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", type=Path, required=True)
    parser.add_argument("--claims", nargs="+", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/bench-planner.md"))
    args = parser.parse_args()
    rows = [Row(**row) for path in args.peers for row in json.loads(path.read_text())]
    found = [Result(**entry) for path in args.claims for entry in json.loads(path.read_text())]
    args.output.write_text(page(rows, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
