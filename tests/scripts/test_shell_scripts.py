"""The shell scripts with a stub in the place of Python: what they look for, do once, and report."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Stands for an interpreter: writes down how it was called, makes a venv of copies of itself, and
# fails where FAIL_AT says so.
STUB = """\
#!/bin/sh
[ "$1" = -c ] || printf '%s\\n' "$*" >>"$STUB_LOG"
[ "$1" != --version ] || echo "Python 3.12.0"
case "$*" in
  *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
esac
case "$*" in
  ${FAIL_AT:-nothing}) exit 1 ;;
esac
"""

# What pyenv puts on the path for a version that is not active.
DEAD_SHIM = "#!/bin/sh\necho 'command not found' >&2\nexit 127\n"

# The tools of the scripts, without whatever Python lies beside them.
TOOLS = ("bash", "sh", "cat", "cksum", "cp", "dirname", "env", "flock", "mkdir", "rm", "tail")


class Sandbox:
    """A copy of the scripts, with a path that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.bin, self.log = folder / "repo", folder / "bin", folder / "calls"
        self.repo.mkdir()
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.repo / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.repo)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def put(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.repo), "STUB_LOG": str(self.log)}
        return subprocess.run(
            [str(self.repo / "scripts" / script), *words],
            env=environment | more,
            capture_output=True,
            text=True,
        )

    def calls(self, part: str) -> list[str]:
        if not self.log.exists():
            return []
        return [line for line in self.log.read_text().splitlines() if part in line]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_set_up_passes_over_a_dead_shim_and_installs_once(sandbox: Sandbox) -> None:
    sandbox.put("python3.12", DEAD_SHIM)
    sandbox.put("python3.13", STUB)
    first = sandbox.run("setup.sh")
    assert first.returncode == 0, first.stderr
    python = first.stdout.splitlines()[-1]
    assert python == str(sandbox.repo / ".venv/bin/python")
    (install,) = sandbox.calls("--editable")
    assert "--constraint" in install
    assert install.endswith("[megatron,view,fast,exact,dev]")
    second = sandbox.run("setup.sh")
    assert second.stdout.splitlines() == [python]
    assert second.stderr == ""
    assert len(sandbox.calls("--editable")) == 1
    assert len(sandbox.calls("planner.warm")) == 1


def test_a_scheduler_that_does_not_compile_stops_nothing(sandbox: Sandbox) -> None:
    sandbox.put("python3.12", STUB)
    assert sandbox.run("setup.sh", FAIL_AT="*planner.warm*").returncode == 0
    assert sandbox.run("setup.sh").returncode == 0
    assert len(sandbox.calls("--editable")) == 1


@pytest.mark.parametrize("file", ["pyproject.toml", "scripts/constraints.txt"])
def test_set_up_installs_again_when_what_is_wanted_changes(sandbox: Sandbox, file: str) -> None:
    sandbox.put("python3.12", STUB)
    sandbox.run("setup.sh")
    with (sandbox.repo / file).open("a") as wanted:
        wanted.write("# changed\n")
    assert sandbox.run("setup.sh").returncode == 0
    assert len(sandbox.calls("--editable")) == 2
    assert len(sandbox.calls("-m venv")) == 1


def test_a_failed_installation_is_not_taken_for_done(sandbox: Sandbox) -> None:
    sandbox.put("python3.12", STUB)
    assert sandbox.run("setup.sh", FAIL_AT="*--editable*").returncode != 0
    assert sandbox.run("setup.sh").returncode == 0
    assert len(sandbox.calls("--editable")) == 2


def test_no_python_and_a_wrong_one_are_said_in_one_line(sandbox: Sandbox) -> None:
    nothing = sandbox.run("setup.sh")
    assert nothing.returncode == 1
    assert "no Python >= 3.12" in nothing.stderr
    wrong = sandbox.run("setup.sh", PYTHON=str(sandbox.put("old", DEAD_SHIM)))
    assert wrong.returncode == 1
    assert "not a Python >= 3.12" in wrong.stderr
    assert wrong.stderr.count("\n") == nothing.stderr.count("\n") == 1
    assert not (sandbox.repo / ".venv").exists()


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_one_failure_fails_the_suite_and_stops_nothing(sandbox: Sandbox, failing: str) -> None:
    sandbox.put("python3.12", STUB)
    assert sandbox.run("test.sh").returncode == 0
    sandbox.log.unlink()
    done = sandbox.run("test.sh", FAIL_AT=f"*{failing}*")
    assert done.returncode == 1
    assert f"failed: {failing}" in done.stderr
    assert [call.split()[1] for call in sandbox.calls("-m ")] == [
        "ruff",
        "ruff",
        "mypy",
        "pytest",
    ]


def test_arguments_go_to_pytest_alone(sandbox: Sandbox) -> None:
    sandbox.put("python3.12", STUB)
    sandbox.run("setup.sh")
    sandbox.log.unlink()
    assert sandbox.run("test.sh", "-k", "patcher").returncode == 0
    assert sandbox.calls("-m ") == ["-m pytest -k patcher"]


def test_scripts_may_be_executed() -> None:
    for script in (*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"):
        assert os.access(script, os.X_OK), script
