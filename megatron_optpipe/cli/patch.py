"""``optpipe patch apply|revert|status|export DIR``: put the switch into a Megatron checkout."""

from __future__ import annotations

from pathlib import Path

import click

_CHECKOUT = click.argument("checkout", metavar="DIR", type=click.Path(path_type=Path))


@click.group(short_help="Patch an existing Megatron checkout, and undo it.")
def patch() -> None:
    """Make plain `pretrain_gpt.py --pipeline-schedule optpipe` work in a Megatron checkout."""


@patch.command("apply")
@_CHECKOUT
def apply(checkout: Path) -> None:
    """Patch the checkout DIR: all of it or nothing; doing it twice changes nothing."""
    from megatron_optpipe.megatron import patcher

    click.echo(patcher.apply(checkout))


@patch.command("revert")
@_CHECKOUT
def revert(checkout: Path) -> None:
    """Take the patch out of DIR again, byte for byte."""
    from megatron_optpipe.megatron import patcher

    click.echo(patcher.revert(checkout))


@patch.command("status")
@_CHECKOUT
def status(checkout: Path) -> None:
    """Say whether DIR is patched, and what was changed in it since."""
    from megatron_optpipe.megatron import patcher

    click.echo(patcher.status(checkout))


@patch.command("export")
@_CHECKOUT
@click.option(
    "-o",
    "--output",
    "patch_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=None,
    help="Write to FILE instead of the standard output.",
)
def export(checkout: Path, patch_file: Path | None) -> None:
    """Write an ordinary .patch for DIR, for `git apply`."""
    from megatron_optpipe.megatron import patcher

    text = patcher.export(checkout)
    if patch_file is None:
        click.echo(text, nl=False)
        return
    from megatron_optpipe.cli.files import require_writable
    from megatron_optpipe.core.problem import write_atomically

    require_writable(patch_file)
    write_atomically(patch_file, text)
    click.echo(f"written to {patch_file}")
