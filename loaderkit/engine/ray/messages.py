"""What a trainer and its actors send one another. Imports nothing heavy, see `actor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.engine.ray.surroundings import Surroundings

if TYPE_CHECKING:
    import numpy as np


class PackedEngine(NamedTuple):
    """What all actors of a loader get: the packed function that makes an engine. `is_constant` says of each buffer
    whether the trainer may not write to it either."""

    stream: np.ndarray[Any, Any]
    buffers: list[np.ndarray[Any, Any]]
    is_constant: list[bool]


class ActorSpec(NamedTuple):
    """What one actor gets at its start. `shard` is (number, of): the module of `Shard` imports torch."""

    surroundings: Surroundings
    preload: str
    shard: tuple[int, int]
    num_torch_threads: int
    next_position: tuple[int, int]
    generation: int
    log_level: int
    program: tuple[Any, ...]  # the `Identity` of its loaderkit


class Hello(NamedTuple):
    """Where an actor runs."""

    pid: int
    node: str  # its address, and the beginning of its number
    boot_id: str


class PackedBatch(NamedTuple):
    """A finished batch: its stream, and the memory of its tensors. `generation` is the number of seeks before it."""

    generation: int
    stream: bytes
    buffers: list[np.ndarray[Any, Any]]
