"""Text from files and exceptions, made fit to be shown: one line, printable, not endless."""

from __future__ import annotations

__all__ = ["one_line"]

MAX_LINE = 600


def one_line(message: str, longest: int = MAX_LINE) -> str:
    """The message without line breaks and control characters; its middle is cut if too long."""
    text = " ".join(message.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) > longest:
        half = (longest - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text
