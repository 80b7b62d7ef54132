"""Small trees shaped like a Megatron checkout, for the tests of the patcher."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

VERSION = "megatron/core/package_info.py"
ARGUMENTS = "megatron/training/arguments.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"

TREE = {
    VERSION: "MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n",
    ARGUMENTS: '''\
"""Flags."""
import argparse


def _add_one(parser):
    parser.add_argument("--one", default=1)
    return parser


def add_megatron_arguments(parser: argparse.ArgumentParser):
    parser = _add_one(parser)

    def unused(parser):
        return parser

    # the last word
    return parser

def validate_args(args, defaults={}):
    if args.one == 0:
        return args
    args.checked = True
    return args


def last(args):
    return args
''',
    SCHEDULES: '''\
"""Schedules."""


def stock():
    return "stock"


def get_forward_backward_func(pp_size=None, vp_size=None, other=None):
    """Choose."""
    if other is not None:
        return other
    if pp_size:
        forward_backward_func = stock
    else:
        forward_backward_func = None
    return forward_backward_func
''',
}


def git(root: Path, *words: str) -> str:
    """Run git in ``root``; its output. Independent of the user's configuration."""
    settings = ("user.name=t", "user.email=t@example.com", "core.autocrlf=false", "gc.auto=0")
    options = [word for setting in settings for word in ("-c", setting)]
    done = subprocess.run(
        ["git", *options, *words], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout


def commit(root: Path) -> Path:
    """Make the tree a repository with everything in one commit."""
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "as it came")
    return root


def write_tree(root: Path, **changes: bytes) -> Path:
    """The small tree; ``version``, ``arguments``, ``schedules`` give a file other contents."""
    names = {"version": VERSION, "arguments": ARGUMENTS, "schedules": SCHEDULES}
    contents = {file: text.encode() for file, text in TREE.items()}
    contents |= {names[name]: content for name, content in changes.items()}
    for file, content in contents.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(content)
    return commit(root)


def copy_installed(root: Path) -> Path:
    """The files that the patch concerns, as the installed megatron-core has them."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = Path(next(iter(spec.submodule_search_locations))).parent
    for file in TREE:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, root / file)
    return commit(root)


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the tree but git's own, with its bytes."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }
