"""Quantities as people write them, and back: ``40GiB`` for bytes, ``90s`` for seconds.

Plain Python, no imports of this package, so that every layer may use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

__all__ = ["UnitError", "format_bytes", "format_ms", "parse_bytes", "parse_seconds"]

_BYTE_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_SIZES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
BYTE_UNITS: Mapping[str, Fraction] = {
    unit: Fraction(size) for unit, size in (_BYTE_SIZES | _BINARY_SIZES).items()
}
SECOND_UNITS: Mapping[str, Fraction] = {
    "": Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
LARGEST = 1e30
"""No quantity of ours is larger; above it a fraction would only cost time."""

_QUANTITY = re.compile(
    r"\s*((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)\s*"
)


class UnitError(ValueError):
    """A quantity that cannot be read. The text is one line for the user."""


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``8000000000``, ``8GB`` (10^9) or ``7.5GiB`` (2^30).

    Raises:
        UnitError: not a number, an unknown unit, or negative.
    """
    return round(_parse(text, BYTE_UNITS, "bytes", "8000000000, 8GB or 7.5GiB"))


def parse_seconds(text: str) -> float:
    """Read a time in seconds: ``20``, ``20s``, ``500ms``, ``2min`` or ``1h``.

    Raises:
        UnitError: not a number, an unknown unit, or negative.
    """
    return float(_parse(text, SECOND_UNITS, "a time", "20, 20s, 500ms, 2min or 1h"))


def _parse(text: str, units: Mapping[str, Fraction], what: str, examples: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise UnitError(f"{text!r} is not {what}: write it like {examples}")
    if float(match.group(1)) > LARGEST:
        raise UnitError(f"{text!r} is not {what}: it is too large; write it like {examples}")
    return Fraction(match.group(1)) * units[unit]


def format_bytes(count: float) -> str:
    """Bytes for people, decimal units as in the files (1 GB = 10^9 bytes): ``3.00 GB``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_ms(value_ms: float) -> str:
    """Milliseconds for people, always in ms so that columns compare: ``11.2 ms``."""
    digits = 1 if abs(value_ms) >= 100 else 2 if abs(value_ms) >= 10 else 3
    return f"{value_ms:.{digits}f} ms"
