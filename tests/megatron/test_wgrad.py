"""The B/W split: bits, hooks, order of reductions (pains 14 to 17, 23b of the field's reports)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.megatron.jobs import ROOT, needs_megatron

pytestmark = needs_megatron


@pytest.fixture(scope="module")
def output() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.megatron.wgrad_checks"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def _entry(lines: list[str], name: str) -> dict[str, Any]:
    (line,) = [line for line in lines if line.startswith(name)]
    found: dict[str, Any] = json.loads(line.removeprefix(name))
    return found


@pytest.fixture(scope="module")
def report(output: list[str]) -> dict[str, Any]:
    return _entry(output, "REPORT ")


def test_w_holds_one_gradient_at_a_time_and_autograd_copies_none(output: list[str]) -> None:
    seen = _entry(output, "MEMORY ")
    assert seen["alive"] == [1] * 5
    assert seen["kept"] == [True] * 5


@pytest.mark.parametrize("kind", ["plain", "overlap", "fused", "fused overlap"])
def test_gradients_are_bitwise_those_of_stock(report: dict[str, Any], kind: str) -> None:
    assert report[kind]["same"]


@pytest.mark.parametrize("kind", ["plain", "overlap", "fused", "fused overlap"])
def test_b_leaves_weights_alone_and_finishes_biases(report: dict[str, Any], kind: str) -> None:
    assert report[kind]["weights_untouched_by_b"]
    assert report[kind]["biases_done_by_b"]


@pytest.mark.parametrize("kind", ["overlap", "fused overlap"])
def test_each_bucket_is_reduced_once_and_after_its_last_w(
    report: dict[str, Any], kind: str
) -> None:
    seen = report[kind]
    assert seen["bucket_groups"] >= 2
    assert seen["reductions"] == seen["bucket_groups"]
    # One bucket at most holds nothing but biases and norms, which B finishes.
    assert seen["reductions_before_w"] < seen["bucket_groups"]


def test_the_fused_kernels_are_really_used(report: dict[str, Any]) -> None:
    # Two linears used twice, four microbatches, and runs of stock, stock, apart (not B alone).
    assert report["fused"]["kernel_calls"] == 2 * 3 * 2 * 2 * 4


def test_megatrons_own_function_is_back_afterwards(report: dict[str, Any]) -> None:
    assert all(entry["stock_function_back"] for entry in report.values())
