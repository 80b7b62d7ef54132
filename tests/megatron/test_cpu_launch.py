"""``python -m megatron_optpipe.cpu``: what a script finds, and what a wrong command line gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """\
import json, os, sys, torch
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "path": sys.path[0],
    "dynamo": os.environ["TORCHDYNAMO_DISABLE"],
    "compiles": torch.compile(os.getcwd) is not os.getcwd,
    "available": torch.cuda.is_available(),
    "device": str(torch.zeros(1, device="cuda").cuda().device),
}))
sys.exit(7)
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=clean | environment
    )


def test_a_script_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run("-m", "megatron_optpipe.cpu", str(script), "--lr", "1e-3")
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == {
        "argv": [str(script), "--lr", "1e-3"],
        "name": "__main__",
        "path": str(tmp_path),
        "dynamo": "1",
        "compiles": False,
        "available": True,
        "device": "cpu",
    }


def test_a_module_runs_and_the_users_environment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(SCRIPT)
    words = ("-m", "megatron_optpipe.cpu", "-m", "some_module", "--x")
    done = run(*words, TORCHDYNAMO_DISABLE="0", PYTHONPATH=_path_with(tmp_path))
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout)
    assert found["argv"][1:] == ["--x"]
    assert found["dynamo"] == "0"


def test_wrong_command_lines_get_one_line() -> None:
    for words, part in ((("no-such.py",), "no-such.py"), (("-m",), "module")):
        done = run("-m", "megatron_optpipe.cpu", *words)
        assert done.returncode == 2
        assert part in done.stderr
        assert done.stderr.count("\n") == 1
    assert run("-m", "megatron_optpipe.cpu").returncode == 2
    shown = run("-m", "megatron_optpipe.cpu", "--help")
    assert shown.returncode == 0
    assert "--distributed-backend gloo" in shown.stdout


def test_too_late_is_refused() -> None:
    code = "import torch; from megatron_optpipe.megatron.cpu import install; install()"
    done = run("-c", code)
    assert done.returncode == 1
    assert "already imported" in done.stderr.splitlines()[-1]


def _path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
