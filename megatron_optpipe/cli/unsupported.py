"""``optpipe unsupported``: what cannot be combined with the plan, and why."""

from __future__ import annotations

import click


@click.command(short_help="List what cannot be combined with optpipe.")
def unsupported() -> None:
    """List the Megatron options that are refused together with optpipe, why, and what to do."""
    from megatron_optpipe.view.unsupported import unsupported_markdown

    click.echo(unsupported_markdown(), nl=False)
