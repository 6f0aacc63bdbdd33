"""The base of all settings in a YAML file: strict, frozen, and with units.

Each source and each stage declares its arguments as a model derived from `Model`, next to its code; `pipeline/config` combines
them and turns all their errors into one `ConfigError`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from loaderkit._internal.units import format_bytes, format_seconds, parse_bytes, parse_seconds

ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), PlainSerializer(format_bytes, when_used="always")]
Duration = Annotated[
    float, BeforeValidator(parse_seconds), Field(gt=0, le=1e9), PlainSerializer(format_seconds, when_used="always")
]


def as_tuple(value: Any) -> Any:
    """A tuple for a list, as YAML has it; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


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
