"""The base of all settings in a YAML file: strict, frozen, and with units.

Each source and each stage declares its arguments as a model derived from `Model`, next to its code; `pipeline/config` combines
them and turns all their errors into one `ConfigError`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from loaderkit._internal.units import format_bytes, format_seconds, parse_bytes, parse_seconds

ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), PlainSerializer(format_bytes, when_used="always")]
Duration = Annotated[
    float, BeforeValidator(parse_seconds), Field(gt=0, le=1e9), PlainSerializer(format_seconds, when_used="always")
]


def as_tuple(value: Any) -> Any:
    """A tuple for a list, as YAML has it; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _rising(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= value[0] <= value[1]:
        raise ValueError(f"[low, high] with 0 <= low <= high, not {list(value)}")
    return value


def _positive(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] <= 0:
        raise ValueError(f"[low, high] with low above 0, not {list(value)}")
    return value


Range = Annotated[tuple[float, float], BeforeValidator(as_tuple), AfterValidator(_rising)]
PositiveRange = Annotated[Range, AfterValidator(_positive)]


def ordered(value: Any, low: float, high: float) -> Any:
    """Bounds between `low` and `high`, as floats; what is no pair of numbers is left to the type. Raises ValueError."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(item) in (int, float) for item in value):
        first, second = float(value[0]), float(value[1])
        if not low <= first <= second <= high:
            raise ValueError(f"[low, high] with {low:g} <= low <= high <= {high:g}, not {list(value)}")
        return (first, second)
    return as_tuple(value)


def around_zero(value: Any, most: float) -> Any:
    """Bounds between -`most` and `most`; one number x stands for [-x, x]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value <= most:
            raise ValueError(f"a number from 0 to {most:g}, or [low, high], not {value!r}")
        value = (-value, value)
    return ordered(value, -most, most)


class Model(BaseModel):
    """A frozen section of a config: no unknown keys, no silent conversions ("3" is not 3, 1 is not true)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=False,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )
