"""One rank's failure ends all ranks, soon, with a message that names rank, op and position."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.megatron.jobs import JOB, needs_megatron, run

pytestmark = needs_megatron

MOST_S = 30.0
"""What users are promised; a process that is stuck is ended after half of it."""


def test_an_exception_in_one_op_ends_all_ranks(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("many_plans.py"))
    flags = ("--pipeline-model-parallel-size", "4", "--pipeline-schedule", "optpipe")
    command = [script, str(tmp_path / "out"), "tests.megatron.fault_cases"]
    ended = run(4, command, [*JOB, *flags])
    ended_s = time.time()
    assert ended.returncode != 0
    message = (
        r"rank 2 failed at op F\(2,3\), position \d+ of 24 compute ops: "
        "ValueError: the forward step of the user failed"
    )
    assert re.search(message, ended.output), ended.output[-4000:]
    raised = re.search(r"raising at (\d+\.\d+)", ended.output)
    assert raised is not None
    took_s = ended_s - float(raised[1])
    print(f"from the exception to the end of the launcher: {took_s:.1f} s")
    assert took_s < MOST_S
