"""Copies a state to host memory that is kept between saves, so that training continues while the copy is written."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from loaderkit._internal.cuda.host_pages import HostPins, PinnedSlices, pages
from loaderkit._internal.system.cgroups import num_cpus_of_rank
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes, identity_of, memory_of, plain_tensor
from loaderkit.checkpoint.transfer.stages import wait_for_queued

_ALIGNMENT = 64
_MAX_KEPT = 2  # one that is being written, one that is being filled
_BY_ONE_THREAD = 2**15  # elements; torch copies more of them by several threads
_PIECE_BYTES = 2**24
_MOST_THREADS = 8

_Piece = tuple[TensorBytes, int, NDArray[np.uint8]]
"""A tensor's bytes, from which of them on, and where to."""


class _StagingArea:
    """Memory that one copy of a state uses at a time."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._slices: PinnedSlices | None = None
        self._user: weakref.ref[NDArray[np.uint8]] | None = None

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def is_free(self) -> bool:
        """True if no tensor of the last copy is left."""
        return self._user is None or self._user() is None

    def has(self, address: int) -> bool:
        """True if there is that address in it."""
        begin: int = self._memory.ctypes.data
        return begin <= address < begin + len(self._memory)

    def slices(self, device: torch.device, pins: HostPins) -> PinnedSlices:
        """Its slices, which are registered from the first call on."""
        if self._slices is None:
            self._slices = PinnedSlices(self._memory, device, pins)
        return self._slices

    def lend(self) -> torch.Tensor:
        """The memory, uint8 [N]; it is in use as long as there is a tensor of it."""
        user = self._memory[:]
        self._user = weakref.ref(user)
        return torch.from_numpy(user)


class HostCopies:
    """Copies states. A copy goes into the memory of an earlier copy, if that is large enough and none of its tensors is
    in use any more.

    `allocate` gives memory of at least that many bytes, uint8 [N], that begins at a page; by default memory of this
    process. It is pinned while a state with tensors on a GPU is copied to it for the first time.
    """

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._allocate = allocate
        self._areas: list[_StagingArea] = []
        self._pins = HostPins()

    def copy(self, state: Any) -> Any:
        """A deep copy of the state whose tensors are contiguous and on the CPU; a tensor that is in it twice is copied once.

        Tensors are found in tables, lists and tuples. All is copied when this returns.
        """
        found = _Found({}, {}, set())
        found.collect(state)
        starts: dict[Any, int] = {}
        num_bytes = 0
        for tensor in found.plain.values():
            if (identity := identity_of(tensor)) not in starts:
                starts[identity] = num_bytes
                num_bytes += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        device = next((tensor.device for tensor in found.plain.values() if tensor.is_cuda), None)
        area = self._area(num_bytes, is_pinned=device is not None)
        memory, slices = area.lend(), None if device is None else area.slices(device, self._pins)
        wait_for_queued(found.devices)
        copies: dict[Any, torch.Tensor] = {}
        memo: dict[int, Any] = {}
        pieces: list[_Piece] = []
        try:
            with torch.no_grad():
                for number, tensor in found.plain.items():
                    identity = identity_of(tensor)
                    if identity not in copies:
                        copies[identity] = _copied(tensor, memory, starts[identity], slices, pieces)
                    memo[number] = copies[identity]
                _copy_all(pieces)
                for number, tensor in found.wrapped.items():
                    memo[number] = _rewrapped(tensor, memo)
            return copy.deepcopy(state, memo)  # copies of sparse tensors stay on their device
        finally:
            wait_for_queued(found.devices)  # for the copies, also after an error, as the memory is used again

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is part of a copy, which neither training nor another save changes while there is a tensor of it."""
        return tensor.device.type == "cpu" and any(area.has(tensor.data_ptr()) for area in self._areas)

    def _area(self, num_bytes: int, *, is_pinned: bool) -> _StagingArea:
        for area in self._areas:
            if area.is_free and len(area) >= num_bytes:
                return area
        self._areas = [area for area in self._areas if not area.is_free][: _MAX_KEPT - 1]
        allocate = self._allocate or partial(pages, is_registered=is_pinned)
        self._areas.append(_StagingArea(allocate(num_bytes)))
        return self._areas[-1]

    def close(self) -> None:
        """Free the memory that is kept, except memory of copies that are still in use. Other copies may follow."""
        self._areas.clear()


class _Found(NamedTuple):
    """The tensors of a state by id: plain ones, and wrappers of tensors, with the inner ones first. Of other values
    only the devices are noted."""

    plain: dict[int, torch.Tensor]
    wrapped: dict[int, torch.Tensor]
    devices: set[torch.device]

    def collect(self, value: Any) -> None:
        """Add those in `value`."""
        if isinstance(value, Mapping):
            for item in value.values():
                self.collect(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.collect(item)
        elif isinstance(value, torch.Tensor) and id(value) not in self.wrapped:
            self.devices.add(value.device)
            if (plain := plain_tensor(value)) is not None:
                self.plain[id(value)] = plain
            elif is_wrapper(value):
                for item in inner_of(value)[0].values():
                    self.collect(item)
                self.wrapped[id(value)] = value


def is_wrapper(tensor: Any) -> bool:
    """True for a tensor that consists of others, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_of(tensor: Any) -> tuple[dict[str, Any], Any]:
    """What a wrapper consists of, as torch.compile flattens it: tensors by attribute, and the rest."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _rewrapped(tensor: torch.Tensor, memo: Mapping[int, Any]) -> torch.Tensor:
    """A wrapper of copies."""
    inner, context = inner_of(tensor)
    copies = {name: memo.get(id(item), item) for name, item in inner.items()}
    wrapper: Any = type(tensor)
    rewrapped: torch.Tensor = wrapper.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
    return rewrapped


def _copied(
    tensor: torch.Tensor, memory: torch.Tensor, start: int, slices: PinnedSlices | None, pieces: list[_Piece]
) -> torch.Tensor:
    """A copy in the memory from `start` on; `slices` are the slices of the memory. From a GPU it may still be running
    on return; a large one within host memory is left to be made, and added to `pieces`."""
    num_bytes = tensor.numel() * tensor.itemsize
    if not num_bytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    target = memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    if tensor.device.type == "cpu" and tensor.numel() > _BY_ONE_THREAD:
        pieces += _pieces_of(tensor, memory_of(target))
        return target
    if not tensor.is_cuda or slices is None:
        target.copy_(tensor)
        return target
    flat, source = target.view(-1), tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    for lo, hi in slices.cut(start, start + num_bytes):
        first, last = (lo - start) // tensor.itemsize, (hi - start) // tensor.itemsize
        flat[first:last].copy_(source[first:last], non_blocking=True)
    return target


def _pieces_of(tensor: torch.Tensor, target: NDArray[np.uint8]) -> list[_Piece]:
    """Of a strided tensor so small that torch copies each by one thread, as it does a whole transposed one, in blocks."""
    source = TensorBytes(tensor)
    step = _PIECE_BYTES
    if source.memory is None:
        is_transposed = tensor.dim() == 2 and tensor.t().is_contiguous()
        step = len(target) if is_transposed else _BY_ONE_THREAD * tensor.itemsize
    return [(source, lo, target[lo : lo + step]) for lo in range(0, len(target), step)]


def _copy_all(pieces: list[_Piece]) -> None:
    """Make copies within host memory by several threads, each of which takes some pieces after others.

    The threads of torch's `copy_` wait for one another at every tensor. Where another program has one of two CPUs, 400
    tensors of 1 MB took them 3.2 s, and these threads 0.03 s.
    """
    together: list[list[_Piece]] = [[]]
    num_bytes = 0
    for piece in pieces:
        if num_bytes >= _PIECE_BYTES:
            together.append([])
            num_bytes = 0
        together[-1].append(piece)
        num_bytes += len(piece[2])
    num_threads = min(_MOST_THREADS, num_cpus_of_rank(), len(together))
    if num_threads > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(num_threads, "loaderkit-staging") as threads:
            for _ in threads.map(_copy, together):
                pass
            return
    for some in together:  # also where no thread may be had, as at the end of the interpreter
        _copy(some)


def _copy(pieces: list[_Piece]) -> None:
    for source, start, target in pieces:
        source.copy(start, target)
