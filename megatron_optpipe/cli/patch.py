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

    changed = patcher.apply(checkout)
    for file in changed:
        click.echo(f"patched {file}")
    if not changed:
        click.echo("applied already; nothing changed")


@patch.command("revert")
@_CHECKOUT
def revert(checkout: Path) -> None:
    """Take the patch out of DIR again, byte for byte."""
    from megatron_optpipe.megatron import patcher

    changed = patcher.revert(checkout)
    for file in changed:
        click.echo(f"reverted {file}")
    if not changed:
        click.echo("not applied; nothing changed")


@patch.command("status")
@_CHECKOUT
def status(checkout: Path) -> None:
    """Say whether DIR is patched, and what was changed in it since."""
    from megatron_optpipe.megatron import patcher

    found = patcher.status(checkout)
    version = ".".join(map(str, found.version))
    click.echo(f"{found.state} (Megatron {version}, patches/{found.patch_set})")
    for file, state in found.files.items():
        click.echo(f"  {state:<14} {file}")


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

    # Bytes: line endings and encodings are those of the checkout's files.
    diff = patcher.export(checkout)
    if patch_file is None:
        click.echo(diff, nl=False)
        return
    from megatron_optpipe.cli.files import require_writable
    from megatron_optpipe.core.files import write_atomically

    require_writable(patch_file, *(checkout / name for name in patcher.status(checkout).files))
    write_atomically(patch_file, diff)
    click.echo(f"written to {patch_file}")
