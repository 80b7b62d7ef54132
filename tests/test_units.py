"""Quantities with units are read exactly, and refused in one line."""

from __future__ import annotations

import pytest

from megatron_optpipe.units import UnitError, format_bytes, format_ms, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("8000000000", 8 * 10**9),
        ("9007199254740993", 9007199254740993),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("7.5GiB", 8053063680),
        ("300MB", 300 * 10**6),
        ("1kiB", 1024),
        ("1e9", 10**9),
        (".5kB", 500),
        ("80TB", 80 * 10**12),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20", 20.0), ("20s", 20.0), ("500ms", 0.5), ("2min", 120.0), ("1h", 3600.0), ("1.5", 1.5)],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "-1", "-1GB", "nan", "inf", "1e999", "1e40", "8 X", "8GBs", "1,5GB", "0x10"],
)
@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds])
def test_refused(parse: object, text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse(text)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert "write it like" in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (3 * 10**9, "3.00 GB"), (1536, "1.54 kB"), (-(10**9), "-1.00 GB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_format_ms_keeps_four_digits_or_so() -> None:
    assert [format_ms(x) for x in (1.23456, 12.3456, 1234.56)] == [
        "1.235 ms",
        "12.35 ms",
        "1234.6 ms",
    ]
