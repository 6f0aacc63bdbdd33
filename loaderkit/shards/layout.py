"""The fields of the samples in shards, and the names of samples and fields in a tar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaderkit.sources.fields import FieldMap

_DEFAULT = FieldMap(None, {"cls": "label"})
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset's metadata, at the top of an archive


@dataclass(frozen=True)
class Layout:
    """What all samples have in common, as the sample `example` has it: field -> True if it is written as the bytes that it is
    in the source; of an array also the type and shape of its one field."""

    fields: Mapping[str, bool]
    example: str
    dtype: str = ""  # NumPy's
    shape: tuple[int, ...] = ()

    @property
    def values(self) -> list[str]:
        """The fields that were decoded, or never encoded: `decode` is to make them of the shards' bytes."""
        return [name for name, is_raw in self.fields.items() if not is_raw]

    def misfit(self, fields: Mapping[str, bool]) -> str | None:
        """Why a sample with these fields does not fit; None if it does."""
        if fields.keys() != self.fields.keys():
            return (
                f"its fields are {', '.join(fields)}, those of sample {self.example!r} {', '.join(self.fields)}: all samples "
                "of shards have the same ones"
            )
        for name, is_raw in fields.items():
            if is_raw != self.fields[name]:
                return f"its field {name!r} is {_STATES[is_raw]}, and that of sample {self.example!r} is not"
        return None

    def array_misfit(self, array: np.ndarray[Any, Any]) -> str | None:
        """Why an array does not fit among the records; None if it does."""
        if (array.dtype.str, array.shape) == (self.dtype, self.shape):
            return None
        return (
            f"it is {array.dtype} {list(array.shape)}, and that of sample {self.example!r} {np.dtype(self.dtype)} "
            f"{list(self.shape)}: records of an array have one type and shape; write a tar instead"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"fields": dict(self.fields), "example": self.example, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Layout:
        """The layout that `to_dict` has described."""
        return cls(values["fields"], values["example"], values["dtype"], tuple(values["shape"]))


_STATES = {True: "still encoded", False: "decoded"}


class Extensions:
    """The extension of every field's members, by what they hold: "jpg", "cls", or with the field's name, "mask.png", unless
    `kind: tar` takes the one alone for that field."""

    def __init__(self, fields: Iterable[str]) -> None:
        self._names: dict[str, str] = {}
        taken: set[str] = set()
        for field in fields:
            base = name = re.sub(r"[^a-z0-9_-]", "-", field.lower()) or "field"
            number = 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
            self._names[field] = name

    def of(self, field: str, content: str) -> str:
        """The extension of a field whose members hold this: "jpg", "npy", ..."""
        return content if _DEFAULT.field_of(content) == field else f"{self._names[field]}.{content}"


def tar_keys(keys: Sequence[str], first: int) -> list[str]:
    """The names of a shard's samples in its tar, without extensions, from their keys in the source; `first` is the position of
    the first. No two are the same.

    What a tar of samples cannot hold in a name is replaced: a dot in the last part (behind it the extension would begin), a
    blank (an index cannot hold it), an absolute path, a name of metadata.
    """
    names: list[str] = []
    taken: set[str] = set()
    for position, key in enumerate(keys, first):
        name = plain = _tar_key(key)
        while name in taken:
            name = f"{plain}-{position}" if name == plain else f"{name}-{position}"
        taken.add(name)
        names.append(name)
    return names


def _tar_key(key: str) -> str:
    folders, _, base = key.rpartition("/")
    stem, dot, _ = base.rpartition(".")
    base = (stem if dot and stem else base).replace(".", "_") or "_"
    parts = [part for part in folders.split("/") if part not in ("", ".", "..")]
    name = "".join("_" if sign.isspace() or sign == "\0" else sign for sign in "/".join([*parts, base]))
    return f"x{name}" if _META.match(name) else name
