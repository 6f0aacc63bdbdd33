"""`kind: dataset`: any Python object with `__len__` and `__getitem__`, such as a map-style torch Dataset.

An item that is a mapping is the sample; a tuple's items are named by `fields`, or "0", "1", ... A list stands for a tuple if
`fields` names several, or if there is a tensor in it. Anything else is the one field of `fields`, or "0".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, ValidationInfo, field_serializer, field_validator

from loaderkit._internal.config.settings import as_tuple
from loaderkit._internal.dtypes import type_of_all
from loaderkit._internal.imports import import_named, is_name
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import USER_ERRORS, ConfigError, SourceError
from loaderkit.samples.sample import FieldRange, Sample
from loaderkit.sources.base import ItemSource, Source, SourceKind
from loaderkit.sources.listing import numbered
from loaderkit.sources.typed_fields import FieldOrigin, checked_names


class DatasetArgs(SourceArgs):
    """A Python object with `__len__` and `__getitem__`."""

    kind: Literal["dataset"] = "dataset"
    object: Any = Field(
        description='"package.module:name" of the object or of a function that returns it, or the object'
    )
    args: dict[str, Any] = Field({}, description="keyword arguments, if `object` names a function or class")
    fields: Annotated[tuple[str, ...] | dict[str, str] | None, BeforeValidator(as_tuple)] = Field(
        None,
        description="names for the items of a tuple or list; or field -> key, path of keys, or type, as in {label: "
        "target.label, x: float32, y: target.y int64}: then these are the sample",
    )
    thread_safe: bool | Literal["auto"] = Field(
        "auto",
        description="true: several threads of a process may take items at once; else one does at a time; auto: true for lists, "
        "arrays, tensors and a TensorDataset",
    )

    @field_validator("object")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if not isinstance(value, str):
            cls.check_given(value)
        elif not is_name(value):
            raise ValueError(f'"package.module:name", not {value!r}')
        return value

    @classmethod
    def check_given(cls, value: Any) -> None:
        """Raise ValueError unless `value`, given as an object, is a data set."""
        if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise ValueError(f"an object with __len__ and __getitem__, not {type(value).__name__}")

    @field_validator("args")
    @classmethod
    def _are_used(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and not isinstance(info.data.get("object", ""), str):
            raise ValueError("no arguments, as `object` is not the name of a function that would get them")
        return value

    @field_validator("fields")
    @classmethod
    def _differ(cls, value: tuple[str, ...] | dict[str, str] | None) -> tuple[str, ...] | dict[str, str] | None:
        if isinstance(value, dict):
            return checked_names(value)
        if value is not None and len(set(value)) < len(value):
            raise ValueError("distinct names, as each is one field")
        return value

    @field_serializer("object")
    def _to_path(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(
                f"a {type(value).__name__} given as an object cannot be written to YAML: "
                'give a function that makes it, as "package.module:function"'
            )
        return value


def open_object(args: DatasetArgs, needed: tuple[str, ...] = ("__len__", "__getitem__")) -> Any:
    """The data set object, with the methods `needed`: imported, and called if it is a function or class. Raises
    `ConfigError`."""
    try:
        dataset: Any = import_named(args.object) if isinstance(args.object, str) else args.object
    except USER_ERRORS as error:
        raise ConfigError(
            f"source.object: {args.object!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    is_ready = all(hasattr(dataset, name) for name in needed) and not isinstance(dataset, type)
    if is_ready and args.args:
        raise ConfigError(
            f"source.args: {args.object!r} is a {type(dataset).__name__}, not a function, so nothing takes the arguments "
            f"{', '.join(args.args)}: leave them out, or name a function that takes them"
        )
    if not is_ready and callable(dataset):
        try:
            dataset = ending_forks(dataset)(**args.args)
        except USER_ERRORS as error:
            given = ", ".join(f"{name}={value!r}" for name, value in args.args.items())
            raise ConfigError(
                f"source.object: {args.object!r}, called with ({given}), failed: {type(error).__name__}: {error}"
            ) from error
    if not all(hasattr(dataset, name) for name in needed):
        raise ConfigError(
            f"source.object: {args.object!r} gives {type(dataset).__name__}, which has no {' and '.join(needed)}"
        )
    return dataset


def _size_of(dataset: Any) -> int:
    try:
        return ending_forks(len)(dataset)
    except USER_ERRORS as error:
        raise ConfigError(
            f"source.object: len() of the {type(dataset).__qualname__} failed ({type(error).__name__}: {error}): a data set "
            "needs a length, an integer"
        ) from error


# Their items are taken without code of the user's, or by code that keeps nothing between two calls.
_SAFE = (list, tuple, range, bytes, np.ndarray, torch.Tensor, torch.utils.data.TensorDataset)


def _is_safe(dataset: Any, args: DatasetArgs) -> bool:
    return type(dataset) in _SAFE if args.thread_safe == "auto" else args.thread_safe


_SINGLE = {np.ndarray, int, float, bytes}  # common types: isinstance() would take longer


class DatasetSource(ItemSource):
    """The items of an object, by its own indices."""

    def __init__(self, dataset: Any, args: DatasetArgs, size: int | None = None) -> None:
        """`size`: the number of items, if the object does not know it."""
        self.dataset = dataset
        self.owner = dataset if not _is_safe(dataset, args) else None
        fields = args.fields
        self._origins = [FieldOrigin.parse(*pair) for pair in fields.items()] if isinstance(fields, dict) else None
        self._fields = None if isinstance(fields, dict) else fields
        self._single = "0" if self._fields is None else self._fields[0] if len(self._fields) == 1 else None
        self._name = type(dataset).__qualname__
        self._get_many = getattr(dataset, "__getitems__", None)
        if size is None:
            size = _size_of(dataset)
            size = size if args.limit is None else min(size, args.limit)
        if size == 0:
            raise SourceError(f"the data set {self._name} has no items: len() is 0")
        self._size = size
        classes = getattr(dataset, "classes", None)
        self.classes = [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None

    def __len__(self) -> int:
        return self._size

    def key(self, index: int) -> str:
        return str(index)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several items."""
        return numbered(indices)

    def origin(self, index: int) -> str:
        return self._name

    def items(self, indices: list[int]) -> list[Any] | None:
        """The result of `__getitems__`, which torch's DataLoader calls too; None if the object lacks it."""
        if self._get_many is None:
            return None
        try:
            items = ending_forks(self._get_many)(indices)
            return items if isinstance(items, list) and len(items) == len(indices) else None
        except USER_ERRORS:
            return None  # one item is bad; taken one by one they tell which

    def sample(self, item: Any) -> Sample:
        sample = self._whole(item)
        return sample if self._origins is None else {origin.field: origin.of(sample) for origin in self._origins}

    def _whole(self, item: Any) -> Sample:
        if isinstance(item, Mapping):  # a dict, a tokenizer's BatchEncoding, a row of a data frame's
            return dict(item)
        if not isinstance(item, tuple) and not self._stands_for_tuple(item):
            if self._single is not None:
                return {self._single: item}
            item = (item,)
        return dict(zip(self._names(item), item, strict=True))

    def columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        if self._origins is not None:
            return None
        kind = type_of_all(items)
        if kind is tuple and len({*map(len, items)}) == 1:
            return dict(zip(self._names(items[0]), map(list, zip(*items, strict=True)), strict=True))
        is_single = (
            kind in _SINGLE
            or (kind is not None and isinstance(items[0], torch.Tensor))
            or not any(isinstance(item, (tuple, list, Mapping)) for item in items)
        )
        return {self._single: items} if is_single and self._single is not None else None

    def _stands_for_tuple(self, item: Any) -> bool:
        """True for a list whose items are fields, not one value."""
        if not isinstance(item, list):
            return False
        return (self._fields is not None and len(self._fields) > 1) or any(
            isinstance(value, (torch.Tensor, np.ndarray)) for value in item
        )

    def _names(self, items: tuple[Any, ...] | list[Any]) -> tuple[str, ...]:
        num = len(items)
        names = self._fields or tuple(map(str, range(num)))
        if len(names) != num:
            kind = "list" if isinstance(items, list) else "tuple"
            raise ValueError(f"the item is a {kind} of {num}, `fields` names {len(names)}: {', '.join(names)}")
        return names

    def ranges(self, index: int) -> list[FieldRange]:
        raise SourceError("the items of a Python object have no byte ranges")

    def constants(self, index: int) -> Sample:
        return {}

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        raise SourceError(
            "order.shuffle: block needs a source with byte ranges (files, tar, array); "
            "use global or none with a data set object"
        )

    def fingerprint(self) -> str:
        return f"{self._name}-{self._size}"


def _open(args: DatasetArgs, connector: Connector | None) -> DatasetSource:
    return DatasetSource(open_object(args), args)


def _reopen(args: DatasetArgs, num_items: int) -> Callable[[], Source] | None:
    """A data set given by name is opened again by that name in each process, as it may hold open files."""
    return partial(_opened_again, args, num_items) if isinstance(args.object, str) else None


def _opened_again(args: DatasetArgs, num_items: int) -> DatasetSource:
    source = _open(args, None)
    if len(source) != num_items:
        raise SourceError(
            f"source.object: {args.object!r} has {num_items} items in the trainer's process and {len(source)} in the "
            "loading process, so the batches would be others: make it return the same items every time"
        )
    return source


DATASET = SourceKind(
    DatasetArgs, "items", _open, reopen=_reopen, objects=lambda args: {"object": args.object, "args": args.args}
)
