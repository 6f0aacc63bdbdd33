"""Exports: copies of a state's tensors in fewer bits, made piece by piece while they are written; and how much they lose.

elements of the staged copy ──> cast, or int8 and a scale for each block of 256 ──> the file
                            └──> sums of squares of what is lost
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite, prod, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.checkpoint.formats.blockwise import ABSMAX, BLOCK, absmax_of, dequantized, num_blocks, quantized
from loaderkit.checkpoint.save.file_plan import ElementSource
from loaderkit.errors import ConfigError

_PIECE = 4096 * BLOCK  # elements that are in memory at a time: 4 MiB of float32


class ExportRule(NamedTuple):
    """What an export contains, by globs of names, and how its floating-point tensors are stored: as `dtype`, or, if that is
    int8, quantised by blocks."""

    keys: tuple[str, ...]
    dtype: torch.dtype
    of: str  # the URL of the checkpoint

    def has(self, name: str) -> bool:
        """True if the export contains a tensor."""
        return any(fnmatchcase(name, glob) for glob in self.keys)

    @property
    def is_quantized(self) -> bool:
        return self.dtype == torch.int8

    @property
    def precision(self) -> str:
        """The name of the type."""
        return str(self.dtype).removeprefix("torch.")

    def described(self) -> dict[str, Any]:
        """What the state file says about it."""
        return {"dtype": self.precision, "of": self.of} | ({"block": BLOCK} if self.is_quantized else {})


def check_rule(rule: ExportRule, matching: Collection[str], names: Sequence[str]) -> None:
    """Raise ConfigError if an export would be empty; `names` are the names of all tensors."""
    if not matching:
        listed = ", ".join(names[:5])
        raise ConfigError(
            f"copies: no tensor has a name that matches {', '.join(rule.keys)}; there are {listed or 'none'}"
        )


@dataclass
class Loss:
    """The sums of squares of a tensor's elements, and of the differences from what is stored for them. Any thread may add."""

    of_values: float = 0.0
    of_differences: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Add elements and what they are stored as, both float."""
        wide = values.double()
        of_values, of_differences = float(wide.square().sum()), float((wide - stored.double()).square().sum())
        with self._lock:
            self.of_values += of_values
            self.of_differences += of_differences


class StoredTensor(Protocol):
    """A tensor of an export, and the dtype and shape of the tensor it was made of."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def made_of(self) -> tuple[torch.dtype, tuple[int, ...]] | None: ...

    @property
    def name(self) -> str: ...


def report_of(stored: Iterable[StoredTensor], losses: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Size and error of an export: `losses` are the sums of squares by name. The error is None if it is not finite."""
    num_bytes = source_bytes = 0
    for tensor in stored:
        num_bytes += tensor.num_bytes
        if tensor.made_of is None:
            source_bytes += tensor.num_bytes
        elif tensor.name in losses or not tensor.num_bytes:
            source_bytes += tensor.made_of[0].itemsize * prod(tensor.made_of[1])
    errors = {name: relative_error([sums]) for name, sums in losses.items()}
    worst = max(errors, key=lambda name: (not isfinite(errors[name]), errors[name]), default="")
    return {
        "num_bytes": num_bytes,
        "source_bytes": source_bytes,
        "relative_error": _finite(relative_error([*losses.values()])),
        "worst": {"name": worst, "relative_error": _finite(errors.get(worst, 0.0))},
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def config_in(text: str, precision: str) -> str:
    """A model's config.json that says in which type its weights are."""
    config = json.loads(text)
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    return json.dumps(config | dict.fromkeys(names, precision), indent=2) + "\n"


def relative_error(sums: Sequence[tuple[float, float]]) -> float:
    """The norm of all differences, divided by the norm of all values; 0 without values."""
    of_values, of_differences = (sum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
    return sqrt(of_differences / of_values) if of_values else sqrt(of_differences)


class _Converted:
    """The elements of `source`, converted to floats of type `dtype`; any range of them."""

    def __init__(self, source: ElementSource, dtype: torch.dtype) -> None:
        self.device = source.device
        self._source, self._dtype = source, dtype
        self.num_elements = source.num_bytes // dtype.itemsize

    def read(self, first: int, end: int) -> torch.Tensor:
        """The elements [first, end)."""
        data = np.empty((end - first) * self._dtype.itemsize, np.uint8)
        self._source.copy(first * self._dtype.itemsize, data)
        return torch.from_numpy(data).view(self._dtype)


class CastElements(_Converted):
    """The elements of `source` cast to another floating-point type."""

    def __init__(self, source: ElementSource, dtype: torch.dtype, target: torch.dtype, loss: Loss) -> None:
        super().__init__(source, dtype)
        self._target, self._loss = target, loss
        self.num_bytes = self.num_elements * target.itemsize

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; both begin and end with an element."""
        item = self._target.itemsize
        for first, end in _pieces(start // item, (start + len(target)) // item):
            values = self.read(first, end)
            cast = values.to(self._target)
            self._loss.add(values, cast)
            target[first * item - start : end * item - start] = cast.view(torch.uint8).numpy()


class QuantizedElements(_Converted):
    """The elements of `source` as int8, each block of 256 divided by its largest."""

    def __init__(self, source: ElementSource, dtype: torch.dtype, loss: Loss) -> None:
        super().__init__(source, dtype)
        self._loss = loss
        self.num_bytes = self.num_elements

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on."""
        for first, end in _pieces(start, start + len(target)):
            begin = first // BLOCK * BLOCK
            values = self.read(begin, min(-(-end // BLOCK) * BLOCK, self.num_elements))
            absmax = absmax_of(values)
            codes, inside = quantized(values, absmax), slice(first - begin, end - begin)
            self._loss.add(values[inside], dequantized(codes, absmax)[inside])
            target[first - start : end - start] = codes[inside].view(torch.uint8).numpy()


class AbsmaxElements(_Converted):
    """The largest absolute value of each block of 256 elements of `source`, as float32."""

    def __init__(self, source: ElementSource, dtype: torch.dtype) -> None:
        super().__init__(source, dtype)
        self.num_bytes = 4 * num_blocks(self.num_elements)

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; both begin and end with an element."""
        done = 0
        for first, end in _pieces(start // 4 * BLOCK, min((start + len(target)) // 4 * BLOCK, self.num_elements)):
            absmax = absmax_of(self.read(first, end)).view(torch.uint8).numpy()
            target[done : done + len(absmax)] = absmax
            done += len(absmax)


def _pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, end) in pieces that end with multiples of their size."""
    while first < end:
        step = min((first // _PIECE + 1) * _PIECE, end)
        yield first, step
        first = step


def absmax_key(key: str, keys: Collection[str]) -> str:
    """The name of the scales of the tensor `key`. Raises ConfigError if there is a tensor of that name."""
    if key + ABSMAX in keys:
        raise ConfigError(
            f"copies: {key + ABSMAX!r} is the name of the scales of {key!r}, and of another tensor: rename that"
        )
    return key + ABSMAX
