"""What cannot be combined with ``--pipeline-schedule optpipe``: one table, read by all.

``first_conflict`` is asked at start-up, before anything is built, and ``render_markdown`` makes the
table of the docs from the same rows. A row leaves when a test shows that the combination works.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["CONFLICTS", "Conflict", "first_conflict", "megatron_version", "render_markdown"]

SUPPORTED_LINE = (0, 19)
"""The line of megatron-core whose schedule signature and linear layers this layer knows."""


class Conflict(NamedTuple):
    """One thing that optpipe refuses: when, why, and what to do instead."""

    name: str
    """The flag or condition, as the user knows it."""
    applies: Callable[[Namespace], bool]
    """Whether a job with these (validated) Megatron arguments has it."""
    reason: str
    remedy: str

    def message(self) -> str:
        """The one line that the user sees."""
        return f"{self.name} cannot be combined with optpipe: {self.reason}; {self.remedy}"


def _set(name: str, *off: object) -> Callable[[Namespace], bool]:
    """A condition: the argument ``name`` is there and neither falsy nor one of ``off``."""

    def applies(args: Namespace) -> bool:
        value = getattr(args, name, None)
        return bool(value) and value not in off

    return applies


def _above_one(name: str) -> Callable[[Namespace], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


_STOCK = "use --pipeline-schedule megatron for this job"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "--pipeline-model-parallel-size 1",
        lambda args: (getattr(args, "pipeline_model_parallel_size", None) or 1) < 2,
        "there is no pipeline to plan",
        "use at least 2 pipeline ranks, or --pipeline-schedule megatron",
    ),
    Conflict(
        "--transformer-impl transformer_engine",
        lambda args: getattr(args, "transformer_impl", "local") != "local",
        "the split of B and W is made for Megatron's local layers only, so far",
        "add --transformer-impl local",
    ),
    Conflict(
        "--rampup-batch-size, --step-batch-size-schedule or --decrease-batch-size-if-needed",
        lambda args: any(
            bool(getattr(args, name, None))
            for name in (
                "rampup_batch_size",
                "step_batch_size_schedule",
                "decrease_batch_size_if_needed",
            )
        ),
        "a plan is made for one number of microbatches",
        "keep --global-batch-size constant",
    ),
    Conflict(
        "--context-parallel-size above 1",
        _above_one("context_parallel_size"),
        "Megatron offers it with Transformer Engine attention only, which is refused above",
        "set --context-parallel-size 1",
    ),
    Conflict(
        "--hybrid-context-parallel",
        _set("hybrid_context_parallel"),
        "it brings a schedule of its own",
        _STOCK,
    ),
    Conflict(
        "variable sequence lengths",
        _set("variable_seq_lengths"),
        "messages between stages must have one known shape",
        "pad to --seq-length",
    ),
    Conflict(
        "--sft and packed sequences",
        lambda args: (
            bool(getattr(args, "sft", False))
            or bool(getattr(args, "dataloader_inter_document_masking", False))
        ),
        "the bytes and times of its microbatches differ, a plan assumes that they do not",
        "pad to --seq-length, or use --pipeline-schedule megatron",
    ),
    Conflict(
        "--num-experts",
        _set("num_experts"),
        "the bytes of a microbatch depend on its routing, a plan assumes that they do not",
        _STOCK,
    ),
    Conflict(
        "--overlap-moe-expert-parallel-comm",
        _set("overlap_moe_expert_parallel_comm"),
        "it brings a schedule of its own",
        "leave it out",
    ),
    Conflict(
        "--delay-wgrad-compute",
        _set("delay_wgrad_compute"),
        "the plan already decides when weight gradients are computed",
        "leave it out",
    ),
    Conflict(
        "--defer-embedding-wgrad-compute",
        _set("defer_embedding_wgrad_compute"),
        "the plan already decides when weight gradients are computed",
        "leave it out",
    ),
    Conflict(
        "--mtp-num-layers",
        _set("mtp_num_layers"),
        "multi-token prediction uses the output layer several times; untested with the B/W split",
        _STOCK,
    ),
    Conflict(
        "CUDA graphs (--cuda-graph-impl)",
        _set("cuda_graph_impl", "none"),
        "a captured graph can neither be split into B and W nor have its activations moved",
        "set --cuda-graph-impl none",
    ),
    Conflict(
        "--cpu-offloading-num-layers",
        lambda args: (
            bool(getattr(args, "cpu_offloading", False))
            or (getattr(args, "cpu_offloading_num_layers", None) or 0) > 0
        ),
        "two owners of the same activations",
        "leave it out: the plan offloads",
    ),
    Conflict(
        "--fine-grained-activation-offloading",
        _set("fine_grained_activation_offloading"),
        "two owners of the same activations",
        "leave it out: the plan offloads",
    ),
    Conflict(
        "--moe-paged-stash",
        _set("moe_paged_stash"),
        "two owners of the same activations",
        "leave it out: the plan offloads",
    ),
    Conflict(
        "--num-microbatches-with-partial-activation-checkpoints",
        _set("num_microbatches_with_partial_activation_checkpoints"),
        "the bytes of a stage would differ from microbatch to microbatch",
        "use the same recomputation for every microbatch",
    ),
    Conflict(
        "--distribute-saved-activations",
        _set("distribute_saved_activations"),
        "it rewrites saved activations in place, which a moved activation does not survive",
        "leave it out",
    ),
    Conflict(
        "Megatron FSDP or torch FSDP2",
        lambda args: (
            bool(getattr(args, "use_megatron_fsdp", False))
            or bool(getattr(args, "use_torch_fsdp2", False))
        ),
        "parameters come and go inside a microbatch",
        "use --use-distributed-optimizer instead",
    ),
    Conflict(
        "--tensor-parallel-num-weight-shards (weight rematerialisation)",
        _above_one("gtp_weight_remat_size"),
        "weights are gathered inside the linear layers; untested with the B/W split",
        "leave it out",
    ),
    Conflict(
        "--inprocess-restart",
        _set("inprocess_restart"),
        "the process groups and the fault of the first attempt would be met again",
        "let torchrun restart the processes (--max-restarts)",
    ),
    Conflict(
        "--yaml-cfg",
        _set("yaml_cfg"),
        "Megatron does not check the arguments of a YAML file together, so this table would not "
        "be asked",
        "give the arguments on the command line",
    ),
    Conflict(
        "reinforcement learning (--perform-rl-step)",
        _set("perform_rl_step"),
        "the number of microbatches changes from step to step",
        _STOCK,
    ),
    Conflict(
        "distillation and quantisation by ModelOpt",
        _set("modelopt_enabled"),
        "it changes the shapes of the messages between stages",
        _STOCK,
    ),
)
"""All refusals, in the order in which they are looked for."""


def first_conflict(args: Namespace) -> Conflict | None:
    """The first row of the table that applies to a job, or ``None``.

    Args:
        args: Megatron's arguments after its own validation.
    """
    version = _version_conflict(megatron_version())
    if version is not None:
        return version
    return next((row for row in CONFLICTS if row.applies(args)), None)


def megatron_version() -> str:
    """The version of megatron-core that is imported here, as it writes it."""
    from megatron.core import package_info

    return str(package_info.__version__)


def _version_conflict(version: str) -> Conflict | None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) == SUPPORTED_LINE:
        return None
    line = ".".join(str(part) for part in SUPPORTED_LINE)
    return Conflict(
        f"megatron-core {version}",
        lambda _: True,
        f"this version of megatron-optpipe is made for the {line} line",
        f"install megatron-core {line}",
    )


def render_markdown(rows: Sequence[Conflict] = CONFLICTS) -> str:
    """The table as Markdown: what, why, what to do instead."""
    lines = ["| refused with optpipe | why | instead |", "| --- | --- | --- |"]
    lines += [f"| {_cell(row.name)} | {_cell(row.reason)} | {_cell(row.remedy)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    flags = re.sub(r"(--[a-z0-9-]+(?: \d+)?)", r"`\1`", text)
    return flags.replace("|", "\\|")
