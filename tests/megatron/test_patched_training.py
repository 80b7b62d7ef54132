"""A patched copy of Megatron trains under a plan with nothing but the flag."""

from __future__ import annotations

import importlib.util
import shutil
from argparse import ArgumentParser
from pathlib import Path

from megatron_optpipe.megatron import patcher
from megatron_optpipe.megatron.arguments import add_arguments
from tests.megatron.jobs import JOB, needs_megatron, progress, run

pytestmark = needs_megatron

# Megatron's loop with our model and data, and nothing of our hook but what the patch brings in.
SCRIPT = """
from megatron.core.pipeline_parallel import schedules
from megatron_optpipe.megatron import hook, pretrain

assert "_optpipe" in schedules.get_forward_backward_func.__code__.co_varnames, "not the copy"
hook.install = lambda: None
raise SystemExit(pretrain.main())
"""

SMALL = ("--pipeline-model-parallel-size", "2", "--train-iters", "3", "--eval-iters", "1")


def test_after_apply_the_flag_alone_is_enough(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for part in ("core", "training"):
        installed = Path(next(iter(spec.submodule_search_locations))) / part
        shutil.copytree(installed, tmp_path / "megatron" / part)
    patcher.apply(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    log = tmp_path / "log"
    ours = ("--pipeline-schedule", "optpipe", "--optpipe-log-dir", str(log))
    off = run(2, [str(script)], [*JOB, *SMALL])
    assert off.returncode == 0, off.output[-6000:]
    assert "optpipe:" not in off.output
    on = run(2, [str(script)], [*JOB, *SMALL, *ours])
    assert on.returncode == 0, on.output[-6000:]
    assert (log / "plan.json").is_file()
    assert len(progress(off.output)) >= 3
    assert progress(on.output) == progress(off.output)


def test_flags_that_the_patch_has_added_are_not_added_twice() -> None:
    parser = add_arguments(add_arguments(ArgumentParser()))
    assert parser.parse_args([]).pipeline_schedule == "megatron"
