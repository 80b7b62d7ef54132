"""docs/unsupported.md, made from the table that refuses at start-up."""

from __future__ import annotations

__all__ = ["unsupported_markdown"]

HEAD = """\
# What cannot be combined with optpipe

This page is made by `optpipe unsupported` from the table that a training run asks at start-up
(`megatron_optpipe/megatron/compat.py`); a test compares the two. A job that has one of these is
refused before anything is built, in one line with the reason and the remedy. Without
`--pipeline-schedule optpipe` nothing is refused: the job is stock Megatron.

"""


def unsupported_markdown() -> str:
    """The whole page. Needs no Megatron and no torch."""
    from megatron_optpipe.megatron.compat import render_markdown

    return HEAD + render_markdown()
