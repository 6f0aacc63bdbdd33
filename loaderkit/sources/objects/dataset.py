"""`kind: dataset`: any Python object with `__len__` and `__getitem__`, such as a map-style torch Dataset.

An item that is a mapping is the sample; a tuple's items are named by `fields`, or "0", "1", ... A list counts as a
tuple if `fields` names several, or if there is a tensor in it. Anything else is the one field of `fields`, or "0".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit._internal.dtypes import type_of_all
from loaderkit._internal.system.forks import ending_forks
from loaderkit.errors import USER_ERRORS, ConfigError, SourceError
from loaderkit.samples.sample import Sample
from loaderkit.sources.base import Source, SourceKind
from loaderkit.sources.listing import numbered
from loaderkit.sources.objects.args import DatasetArgs, open_object
from loaderkit.sources.objects.checks import seen_alike
from loaderkit.sources.objects.reader import ItemSource
from loaderkit.sources.typed_fields import FieldOrigin

logger = logging.getLogger("loaderkit")


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
        self._is_said = False
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
        """The result of `__getitems__`, which torch's DataLoader calls too; None if the object lacks it, or if it raises.

        Raises SourceError if it returns another number of items than it was asked for, or no sequence."""
        if self._get_many is None:
            return None
        try:
            items = ending_forks(self._get_many)(indices)
        except USER_ERRORS as error:
            self._say_one_by_one(error)
            return None  # one item is bad; taking them one by one shows which
        is_sequence = isinstance(items, Sequence) or getattr(items, "ndim", 0) > 0  # or an array or a tensor
        num = len(items) if is_sequence else None
        if num != len(indices):
            what = f"a {type(items).__name__}" + ("" if num is None else f" of {num} items")
            raise SourceError(
                f"{self._name}.__getitems__ was asked for {len(indices)} items, and returned {what}: return a list"
            )
        return list(items)

    def _say_one_by_one(self, error: BaseException) -> None:
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "%s.__getitems__ raised %s: %s. Its items are taken one by one then, by __getitem__ (said once)",
                self._name,
                type(error).__name__,
                error,
            )

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
        """True for a list whose items are fields, and which is not one value."""
        if not isinstance(item, list):
            return False
        return (self._fields is not None and len(self._fields) > 1) or any(
            isinstance(value, (torch.Tensor, np.ndarray)) for value in item
        )

    def _names(self, items: tuple[Any, ...] | list[Any]) -> tuple[str, ...]:
        num = len(items)
        names = self._fields or getattr(items, "_fields", None) or tuple(map(str, range(num)))  # of a named tuple
        if len(names) != num:
            kind = "list" if isinstance(items, list) else "tuple"
            raise ValueError(f"the item is a {kind} of {num}, `fields` names {len(names)}: {', '.join(names)}")
        return names

    def fingerprint(self) -> str:
        return f"{self._name}-{self._size}"


def _reopen(args: DatasetArgs, num_items: int) -> Callable[[], Source] | None:
    """A data set given by name is opened again by that name in each process, as it may hold open files."""
    return partial(_opened_again, args, num_items) if isinstance(args.object, str) else None


def _opened_again(args: DatasetArgs, num_items: int) -> DatasetSource:
    source = DatasetSource(open_object(args), args)
    if len(source) != num_items:
        raise SourceError(
            f"source.object: {args.object!r} has {num_items} items in the trainer's process and {len(source)} in the "
            "loading process, so the batches would be others: make it return the same items every time"
        )
    return source


DATASET = SourceKind(
    DatasetArgs,
    lambda args, connector: DatasetSource(open_object(args), args),
    reopen=_reopen,
    has_blocks=False,
    objects=lambda args: {"object": args.object, "args": args.args},
    check_items=lambda args, source: {"seen_alike": seen_alike(source.dataset, args, is_iterable=False)},
)
