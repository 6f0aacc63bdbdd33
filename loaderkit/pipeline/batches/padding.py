"""Tensors of unequal length as one, padded, and the masks that say where the padding is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isinf
from typing import Literal

import torch

from loaderkit.errors import ConfigError, StageError
from loaderkit.samples.slots import TakeBytes, new_tensor


@dataclass(frozen=True)
class Padding:
    """How fields are padded: by one value, or each by its own; at the right or the left of the first dimension, whose size
    becomes a multiple of `multiple`. `masks`: name -> the field that the mask is for; None for all that are padded."""

    value: float | Mapping[str, float] = 0
    side: Literal["right", "left"] = "right"
    multiple: int = 1
    masks: Mapping[str, str | None] = field(default_factory=dict)

    def pad(
        self, name: str, tensors: Sequence[torch.Tensor], take_bytes: TakeBytes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors of equal rank and dtype padded into one, [B, largest...], and their sizes, int64 [B] or [B, rank]."""
        value = self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value
        first = tensors[0]
        _check_value(name, value, first.dtype)
        sizes = torch.tensor([list(tensor.shape) for tensor in tensors], dtype=torch.int64, device="cpu")
        largest = sizes.amax(0).tolist()
        if largest:
            largest[0] = -(-largest[0] // self.multiple) * self.multiple
        shape = (len(tensors), *largest)
        if first.device.type == "cpu":
            padded = new_tensor(shape, first.dtype, take_bytes).fill_(value)
        else:
            padded = torch.full(shape, value, dtype=first.dtype, device=first.device)
        for slot, tensor in zip(padded, tensors, strict=True):
            places = [slice(0, size) for size in tensor.shape]
            if self.side == "left" and places:
                places[0] = slice(largest[0] - tensor.shape[0], largest[0])
            slot[tuple(places)] = tensor
        return padded, sizes[:, 0] if first.ndim == 1 else sizes

    def masks_of(self, batch: Mapping[str, torch.Tensor], padded: Sequence[str]) -> dict[str, torch.Tensor]:
        """The masks of a batch with these `padded` fields: int64 [B, largest]. Raises StageError if the fields of a
        mask differ in length, or have no length."""
        made = {}
        for mask, field_name in self.masks.items():
            names = padded if field_name is None else [field_name]
            lengths = {name: _lengths(name, batch[f"{name}_sizes"]) for name in names}
            for name in names[1:]:
                if not torch.equal(lengths[name], lengths[names[0]]):
                    raise StageError(
                        f"batch: {names[0]!r} and {name!r} differ in length, so {mask!r} cannot be of both: name the field of "
                        f"each mask, as in attention_mask: {{{mask}: {names[0]}}}",
                        stage="batch",
                    )
            made[mask] = self._mask(lengths[names[0]], batch[names[0]])
        return made

    def _mask(self, lengths: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        places = torch.arange(padded.shape[1], device="cpu")
        lengths = lengths[:, None]
        is_there = places < lengths if self.side == "right" else places >= padded.shape[1] - lengths
        return is_there.to(device=padded.device, dtype=torch.int64)


def _lengths(name: str, sizes: torch.Tensor) -> torch.Tensor:
    """The first sizes, of `sizes` as `pad` gives them."""
    if sizes.ndim == 2 and not sizes.shape[1]:
        raise StageError(
            f"batch: {name!r} is a single number a sample, of which there is no attention mask", stage="batch"
        )
    return sizes if sizes.ndim == 1 else sizes[:, 0]


@lru_cache
def _check_value(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise ConfigError if tensors of this dtype cannot hold the value, as integers cannot hold 0.5."""
    held = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item()
    is_held = isinf(held) == isinf(value) if dtype.is_floating_point else held == value
    if not (is_held or dtype.is_complex):
        raise ConfigError(f"batch.pad_value is {value:g}, which {name!r} cannot hold: its type is {dtype}")
