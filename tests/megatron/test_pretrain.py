"""The training entry, with Megatron's own schedule, on the CPU, on real text."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.megatron.cpu import CPU_FLAGS
from megatron_optpipe.megatron.dataset import TOKENIZER_FLAGS, build_dataset, installation_text

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 4
    --lr 1e-2 --lr-decay-style constant --lr-decay-iters 100 --seed 7 --split 90,8,2
    --eval-iters 1 --eval-interval 2 --log-interval 1 --num-workers 0
    --pipeline-model-parallel-size 2
""".split()


def train(*more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of the entry with the stand-in; ``more`` flags last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port}".split()
    entry = "--master-addr 127.0.0.1 -m megatron_optpipe.cpu -m megatron_optpipe.megatron.pretrain"
    words = [*launcher, *entry.split(), *MODEL, *CPU_FLAGS, *TOKENIZER_FLAGS, *more]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)


def test_it_trains_on_real_text_with_validation(tmp_path: Path) -> None:
    data = build_dataset(installation_text(), tmp_path)
    done = train("--data-path", str(data))
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: (\S+)", done.stdout)]
    assert len(losses) == 4
    # ln 257 is what knowing nothing costs; the vocabulary is padded a little.
    assert abs(losses[0] - 5.7) < 0.4
    assert losses[-1] < losses[0] - 0.3
    valid = re.findall(r"validation loss at iteration (\d+) .*?lm loss value: (\S+)", done.stdout)
    assert [iteration for iteration, _ in valid[:2]] == ["2", "4"]
    assert float(valid[1][1]) < float(valid[0][1]) < losses[0]
    assert "optpipe: replaced" not in done.stderr, "off means off"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        ({"sft": True}, "--sft True"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_remedy(
    flags: dict[str, object], part: str
) -> None:
    from megatron_optpipe.megatron.pretrain import _refuse_not_served

    _refuse_not_served(Namespace(context_parallel_size=1, mtp_num_layers=None, sft=False))
    with pytest.raises(OptPipeError, match=f"{part}: .*pretrain_gpt.py") as caught:
        _refuse_not_served(Namespace(**flags))
    assert "\n" not in str(caught.value)
