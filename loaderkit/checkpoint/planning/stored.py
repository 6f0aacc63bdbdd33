"""The table of a checkpoint's tensors, made of what the ranks have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)


class Stored(NamedTuple):
    """Where an item lies, and the sizes of a tensor's box; None for a plain value."""

    info: Any
    sizes: torch.Size | None


def described_as_stored(metadata: Metadata, stored: Mapping[MetadataIndex, Stored]) -> dict[str, Any]:
    """What the table says of each name, with the boxes in which the tensors are stored. Raises ValueError if one lacks some."""
    boxes: dict[str, list[ChunkStorageMetadata]] = {}
    for index, item in stored.items():
        if index.offset is not None and item.sizes is not None:
            boxes.setdefault(index.fqn, []).append(ChunkStorageMetadata(index.offset, item.sizes))
    described: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted, there = (sum(prod(box.sizes) for box in some) for some in (entry.chunks, boxes.get(name, [])))
            if wanted != there:
                raise ValueError(f"{there} elements of {name!r} were written, and {wanted} were to be")
            described[name] = replace(entry, chunks=boxes.get(name, []))
        else:
            described[name] = entry
    return described
