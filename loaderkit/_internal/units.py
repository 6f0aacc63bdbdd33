"""Parses and formats sizes and durations."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any


def say_seconds(seconds: float) -> str:
    """A duration for messages and reports."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def say_age(seconds: float) -> str:
    """A time that has passed, in the largest unit of which there are at least two: "90 s", "5 min", "47 h", "3 d"."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds // factor:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def say_count(number: int, noun: str) -> str:
    """A number of things: "1 shard", "2 shards"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_SIZE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: Any) -> int:
    """A size in bytes: an integer, or text such as "64MiB", "2 GB". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"a size such as 8MiB, 2GiB or a number of bytes, not {value!r}")
    return round(Fraction(match[1]) * _SIZE_UNITS[match[2].upper()])


def format_bytes(num_bytes: int) -> str:
    """The shortest text in binary units that `parse_bytes` turns back into the same number."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def say_bytes(num_bytes: int) -> str:
    """A size for messages, with its unit, rounded up."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 10 * factor:
            return f"{-(-num_bytes // factor)} {unit}"
    return f"{num_bytes} bytes"


def say_size(num_bytes: float) -> str:
    """A size for reports, in decimal units, like speeds."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def parse_seconds(value: Any) -> float:
    """A duration in seconds: a number, or text such as "500ms", "60s", "5min", "2h". Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _TIME_UNITS:
        raise ValueError(f"a duration such as 500ms, 60s, 5min, not {value!r}")
    return float(match[1]) * _TIME_UNITS[match[2]]


def format_seconds(seconds: float) -> str:
    """The shortest text that `parse_seconds` turns back into the same number."""
    return f"{seconds:g}s" if float(f"{seconds:g}") == seconds else f"{seconds!r}s"
