"""The base of everything that may stand in a YAML file: strict, frozen, and with units.

Each source and each stage declares its own arguments as a model derived from these, next to its code; `config.py` puts
them together and turns their complaints into one `ConfigError`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PositiveInt

_SIZE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
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
    """A size for messages, with its unit: never too small a number for what was meant."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 10 * factor:
            return f"{-(-num_bytes // factor)} {unit}"
    return f"{num_bytes} bytes"


def say_size(num_bytes: float) -> str:
    """A size for people, in units of 1000, as speeds are told."""
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


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), PlainSerializer(format_bytes, when_used="always")]
Duration = Annotated[
    float, BeforeValidator(parse_seconds), Field(gt=0, le=1e9), PlainSerializer(format_seconds, when_used="always")
]


class Model(BaseModel):
    """A frozen part of a configuration: no unknown keys, no silent conversions ("3" is not 3, 1 is not true)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=False,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


class SourceArgs(Model):
    """What every source takes."""

    limit: PositiveInt | None = Field(None, description="only the first N samples of the canonical order")


class StageArgs(Model):
    """What every stage takes."""

    name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z_][\w-]*$",
        description="default: its kind; a second one of a kind is kind-2",
    )
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="threads of its own, or auto: share the automatic pool with its neighbours"
    )


FieldNames = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""Which fields a stage acts on; None: every field it fits."""
