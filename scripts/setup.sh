#!/usr/bin/env bash
# Make .venv in the repository and install everything into it; seconds when that is done already.
# Prints the venv's Python on the last line. PYTHON names the interpreter to use, if not the best
# one found. Progress goes to stderr.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.optpipe-installed"
constraints="$root/scripts/constraints.txt"

say() { printf '%s\n' "$*" >&2; }

# Asked by running it: a shim on the path may stand for an interpreter that is not there.
good() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        if good "$PYTHON"; then printf '%s\n' "$PYTHON"; return; fi
        say "setup: PYTHON=$PYTHON: not a Python >= 3.12 with venv; name another, or unset PYTHON"
        return 1
    fi
    for candidate in python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
        if good "$candidate"; then printf '%s\n' "$candidate"; return; fi
    done
    if candidate=$(uv python find '>=3.12' 2>/dev/null) && good "$candidate"; then
        printf '%s\n' "$candidate"
        return
    fi
    say "setup: no Python >= 3.12 found; install one, or name one: PYTHON=/path/to/python3.12 $0"
    return 1
}

# uv unpacks torch's gigabytes several times faster than pip; where there is none it is fetched into
# the venv. Where it fails (pip may know a mirror that uv does not) pip does all.
install() {
    local wanted=(--quiet --constraint "$constraints" --editable "$root[megatron,view,fast,exact,dev]")
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check) uv=uv
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >&2
    if ! uv --version >/dev/null 2>&1; then
        "${pip[@]}" --quiet uv >/dev/null 2>&1 || true
        uv="$venv/bin/uv"
    fi
    if "$uv" --version >/dev/null 2>&1 &&
        "$uv" pip install --python "$venv/bin/python" --compile-bytecode "${wanted[@]}" >&2; then
        return
    fi
    "${pip[@]}" "${wanted[@]}" >&2
}

# Two scripts started at once must not install into one another.
if command -v flock >/dev/null 2>&1; then
    exec 9>"$root/.setup.lock"
    flock 9
fi

wanted="$(cat "$root/pyproject.toml" "$constraints" | cksum) $root"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    printf '%s\n' "$venv/bin/python"
    exit
fi

if ! good "$venv/bin/python"; then
    python=$(find_python)
    say "setup: making .venv with $("$python" --version) ..."
    rm -rf "$venv"
    uv venv --quiet --seed --python "$python" "$venv" 2>/dev/null ||
        "$python" -m venv --clear "$venv" >&2
fi
say "setup: installing torch, megatron-core and the rest (several GB the first time) ..."
start=$SECONDS
install
say "setup: compiling the planner's list scheduler, once ..."
"$venv/bin/python" -m megatron_optpipe.planner.warm >&2 || true
printf '%s\n' "$wanted" >"$stamp"
say "setup: done in $((SECONDS - start)) s"
printf '%s\n' "$venv/bin/python"
