"""`fields` of untyped data (JSON, TFRecords, Python objects): the key that a field is made of, and its declared type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator, Field

from loaderkit.errors import FormatError
from loaderkit.samples.values import as_array

DTYPES = (
    "bool",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""The types that `fields` may declare."""
_MISSING = object()


def checked_names(value: dict[str, str]) -> dict[str, str]:
    """Names of fields; raises ValueError for those that cannot be."""
    for name, key in value.items():
        if not name or not key:
            raise ValueError(f"a name and what it is called in the data, not {name!r}: {key!r}")
        if name.startswith("__"):
            raise ValueError(f"{name!r}: names that begin with two underscores are reserved")
    return value


Names = Annotated[dict[str, str], Field(min_length=1), AfterValidator(checked_names)]
"""Name of a field -> the key that it is made of in the data."""


class FieldOrigin(NamedTuple):
    """A field, the key that it is made of, and its type, or None for the data's own type."""

    field: str
    key: str
    dtype: str | None

    @classmethod
    def parse(cls, field: str, text: str) -> FieldOrigin:
        """Parse an entry of `fields`: "key", "float32" (of the key with the field's own name) or "key float32"."""
        key, _, last = text.rpartition(" ")
        if last not in DTYPES:
            return cls(field, text, None)
        return cls(field, key.strip() or field, last)

    def of(self, values: Mapping[str, Any]) -> Any:
        """The field of a sample. Raises FormatError."""
        value = pick(values, self.key)
        return value if self.dtype is None else self.typed(value)

    def typed(self, value: Any) -> Any:
        """Numbers, lists of them, arrays or a tensor in the declared type. Raises FormatError for numbers that the type
        cannot hold."""
        assert self.dtype is not None
        if isinstance(value, list) and {*map(type, value)} == {int, float}:
            value = as_array(value)  # which refuses what would be rounded
        try:
            if isinstance(value, torch.Tensor):
                plain = value.detach().cpu()
                array = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()  # NumPy has no bfloat16
            else:
                array = np.asarray(value)
        except (TypeError, ValueError):  # lists that differ in length; a type that NumPy lacks
            array = np.empty(0, object)
        if array.dtype.kind not in "biuf":
            what = "null" if value is None else "text" if isinstance(value, str) else "no number nor numbers"
            raise FormatError(f"its {self.key!r} is {what}, and `fields` declares {self.field!r} as {self.dtype}")
        if not _holds(np.dtype(self.dtype), array):
            raise FormatError(f"its {self.key!r} has a number that {self.dtype}, declared in `fields`, cannot hold")
        typed = array.astype(self.dtype)
        return torch.from_numpy(typed) if isinstance(value, torch.Tensor) else typed[()]


def pick(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a path of keys with dots between. Raises FormatError."""
    found = values.get(key, _MISSING)
    if found is not _MISSING:
        return found
    found = values
    for part in key.split("."):
        found = found.get(part, _MISSING) if isinstance(found, Mapping) else _MISSING
    if found is _MISSING:
        raise FormatError(f"it has no {key!r}, only {', '.join(map(repr, values)) or 'nothing'}")
    return found


def _holds(dtype: np.dtype[Any], array: np.ndarray[Any, Any]) -> bool:
    """True if a dtype can hold the numbers of an array: rounded if it is a float, else exactly."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return bool((np.isinf(array.astype(dtype)) == np.isinf(array)).all())
    if not array.size:
        return True
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    is_whole = array.dtype.kind != "f" or bool((array == np.trunc(array)).all())  # not of NaN
    return is_whole and low <= array.min().item() and array.max().item() <= high
