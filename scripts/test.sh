#!/usr/bin/env bash
# The whole test suite: style, types, tests. Arguments go to pytest (such as: -k patcher).
# Everything is run even if something failed; the exit code is 0 only if all passed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/scripts/setup.sh" | tail -n 1)
cd "$root"
failed=()
run() {
    local name=$1 start=$SECONDS
    shift
    printf '== %s\n' "$name"
    if "$@"; then
        printf '== %s: passed (%d s)\n' "$name" "$((SECONDS - start))"
    else
        failed+=("$name")
        printf '== %s: FAILED (%d s)\n' "$name" "$((SECONDS - start))"
    fi
}
if [ "$#" -eq 0 ]; then
    run "ruff" "$python" -m ruff check .
    run "ruff format" "$python" -m ruff format --check .
    run "mypy" "$python" -m mypy
fi
run "pytest" "$python" -m pytest "$@"
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
