"""The fields of the samples in shards, and the names of samples and fields in a tar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from loaderkit.sources.fields import FieldMap

Int64 = NDArray[np.int64]
_BLOCK = 65_536  # samples whose keys are looked up at a time
_DEFAULT = FieldMap(None, {"cls": "label"})
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset's metadata, at the top of an archive


@dataclass(frozen=True)
class SampleLayout:
    """What all samples have in common, taken from the sample `example`: for each field, True if its bytes are written
    as they are in the source; for an array also the dtype and shape of its one field."""

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
    def of(cls, values: Mapping[str, Any]) -> SampleLayout:
        """The layout that `to_dict` has described."""
        return cls(values["fields"], values["example"], values["dtype"], tuple(values["shape"]))


_STATES = {True: "still encoded", False: "decoded"}


class Extensions:
    """The extensions of every field's members, by what they hold: "jpg", "cls", or with the field's name, "mask.png",
    if `kind: tar` would not take the extension alone for that field."""

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


def tar_key(key: str) -> str:
    """The name of a sample in a tar, without extensions, from its key in the source.

    Parts that a tar of samples cannot have in a name are replaced: a dot in the last part (the extension would begin
    there), a blank (an index cannot hold it), an absolute path, a name of metadata.
    """
    folders, base = _parts(key)
    stem, dot, _ = base.rpartition(".")
    return _joined(folders, stem if dot and stem else base)


def clashing_keys(keys_of: Callable[[Int64], list[str]], num: int) -> dict[int, str]:
    """New names for the samples (of `num`) whose names would be equal to others', by number, so that all names differ;
    the others have their `tar_key`. Their extension becomes part of them ("x_jpg", "x_png"), then their number if need
    be."""
    hashes = np.empty(num, np.uint64)
    for begin in range(0, num, _BLOCK):
        keys = keys_of(np.arange(begin, min(begin + _BLOCK, num), dtype=np.int64))
        hashes[begin : begin + len(keys)] = [_hash(tar_key(key)) for key in keys]
    found, counts = np.unique(hashes, return_counts=True)
    clashing = np.flatnonzero(np.isin(hashes, found[counts > 1]))
    taken = set(found.tolist()) if len(clashing) else set()
    names: dict[int, str] = {}
    for begin in range(0, len(clashing), _BLOCK):
        numbers = clashing[begin : begin + _BLOCK]
        for number, key in zip(numbers.tolist(), keys_of(numbers), strict=True):
            name = _joined(*_parts(key))
            while (hashed := _hash(name)) in taken:
                name = f"{name}-{number}"
            taken.add(hashed)
            names[number] = name
    return names


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))


def _parts(key: str) -> tuple[str, str]:
    folders, _, base = key.rpartition("/")
    return folders, base


def _joined(folders: str, base: str) -> str:
    parts = [part for part in folders.split("/") if part not in ("", ".", "..")]
    base = base.replace(".", "_") or "_"
    name = "".join("_" if sign.isspace() or sign == "\0" else sign for sign in "/".join([*parts, base]))
    return f"x{name}" if _META.match(name) else name
