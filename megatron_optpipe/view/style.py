"""Colours and names shared by every picture."""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, str] = {
    "F": "#3b75af",
    "B": "#e8853a",
    "W": "#57a05a",
    "O": "#8e63a9",
    "R": "#c8588d",
}
NAMES: Mapping[str, str] = {
    "F": "F forward",
    "B": "B input gradient",
    "W": "W weight gradient",
    "O": "offload (D2H)",
    "R": "reload (H2D)",
}
INK = "#22262a"
FAINT = "#8b939b"
LIMIT = "#c0392b"
IDLE = "#eef0f2"


def shade(colour: str, chunk: int, num_chunks: int) -> str:
    """The colour of a device's chunk: later chunks are lighter, so that they can be told apart."""
    if num_chunks <= 1:
        return colour
    lighten = 0.5 * chunk / (num_chunks - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * lighten):02x}" for part in parts)
