#!/usr/bin/env bash
# Train a small byte-level GPT on real text under an OptPipe plan: set up, measure, plan, train.
#   ./scripts/train.sh [megatron arguments]       they override the defaults (scripts/train.py)
#   CHUNKS=2 ./scripts/train.sh                   two model chunks on each rank
#   MEGATRON=DIR ./scripts/train.sh               pretrain_gpt.py of a patched checkout instead
# Results lie in runs/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/scripts/setup.sh" | tail -n 1)
exec "$python" "$root/scripts/train.py" "$@"
