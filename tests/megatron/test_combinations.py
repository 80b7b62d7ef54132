"""Plans beside data and tensor parallelism, mixed precision, recomputation: stock's bits too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.jobs import many, needs_megatron

pytestmark = needs_megatron

COMBINATIONS = {
    "2 data x 2 pipeline, bf16, distributed optimizer with both overlaps": (
        *("--pipeline-model-parallel-size", "2", "--bf16", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "4 pipeline, losses by token": (
        *("--pipeline-model-parallel-size", "4", "--calculate-per-token-loss"),
    ),
    "2 tensor x 2 pipeline, full recomputation, untied embeddings": (
        *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "--untie-embeddings-and-output-weights"),
        # Evaluation has batches of its own shape and number.
        *("--eval-micro-batch-size", "1", "--eval-global-batch-size", "6"),
    ),
}


@pytest.mark.parametrize("name", list(COMBINATIONS))
def test_a_combination_gives_the_bits_of_stock(name: str, tmp_path: Path) -> None:
    flags = (*COMBINATIONS[name], "--train-iters", "5")
    for seen in many(4, "combination_cases", tmp_path / "out", *flags):
        assert set(seen) == {"stock", "adversary", "fused"}
        for order, case in seen.items():
            assert case == seen["stock"], order
        assert len(seen["stock"]["grad_norm"]) == 5
