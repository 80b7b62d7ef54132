"""Train a GPT with the megatron-core wheel alone, which brings no ``pretrain_gpt.py``.

``torchrun -m megatron_optpipe.megatron.pretrain MEGATRON-ARGUMENTS``. All of Megatron's flags and
ours. With ``--pipeline-schedule megatron`` (the default) stock Megatron runs, object for object;
no file is patched either way. A Megatron checkout's own ``pretrain_gpt.py`` does more (context
parallelism, fill-in-the-middle, fine-tuning data, ...): see ``optpipe patch apply``.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_optpipe.core.errors import OptPipeError
from megatron_optpipe.megatron import hook
from megatron_optpipe.megatron.helpers import skip_helper_build
from megatron_optpipe.megatron.replacements import Replacements

_FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")

#: Flags that ``pretrain_gpt.py`` serves and this entry does not: (attribute, flag, what is fine).
_NOT_SERVED = (
    ("context_parallel_size", "--context-parallel-size", 1),
    ("mtp_num_layers", "--mtp-num-layers", None),
    ("sft", "--sft", False),
    ("fim_data", "--fim-data", False),
    ("logits_load_dir", "--logits-load-dir", None),
)


def datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test set with at least ``num_samples`` samples each.

    Built by every rank whose stage ``vp_stage`` reads tokens or labels (the first or the last);
    the others get None. Megatron's datasets provider.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(is_first_or_last_pipeline_stage, vp_stage), config
    )
    train, valid, test = builder.build()
    return train, valid, test


# Every tensor-parallel rank reads its own copy of the batch instead of being sent one.
datasets.is_distributed = True  # type: ignore[attr-defined]


def _next_batch(data: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch, on the device: tokens, labels, ... of shape ``[micro batch, sequence]``.

    All None on a stage between the first and the last.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_FIELDS)
    batch = next(data)
    found = {name: batch.get(name) for name in _FIELDS}
    return {k: None if v is None else v.cuda(non_blocking=True) for k, v in found.items()}


def _loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of all unmasked tokens, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    logged = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": logged}


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """One forward of one microbatch through one model chunk; Megatron's forward step function.

    Returns the chunk's output and the function that turns the last chunk's output into a loss.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _next_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(_loss, batch["loss_mask"])


def _refuse_not_served(args: Namespace) -> None:
    for attribute, flag, fine in _NOT_SERVED:
        value = getattr(args, attribute, fine)
        if value != fine:
            raise OptPipeError(
                f"{flag} {value}: this small entry does not serve it; "
                "use pretrain_gpt.py of a checkout (optpipe patch apply DIR)"
            )


def main() -> int:
    """Parse the command line and train. Returns 0, or 2 with one line about a user's error."""
    try:
        skip_helper_build(Replacements())
        hook.install()
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        _refuse_not_served(args)
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    except OptPipeError as error:
        print(f"optpipe: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
