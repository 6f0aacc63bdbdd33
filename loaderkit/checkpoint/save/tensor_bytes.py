"""A tensor as a sequence of bytes, in C order. Any range of it can be copied, without making the tensor contiguous."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.checkpoint.tensor_boxes import boxes_in

_NUM_SAMPLES = 512
_PLACES = np.random.default_rng(0).random(_NUM_SAMPLES)  # the same in every process
_SAME_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_tensor(value: Any) -> torch.Tensor | None:
    """The tensor itself if it is an ordinary dense one, which consists of its elements alone; else None."""
    wait = getattr(value, "trigger_wait", None)  # what a collective will have filled
    if isinstance(value, torch.Tensor) and callable(wait):
        value = wait()
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # a wrapper's elements are elsewhere
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return None
    return value.detach().as_subclass(torch.Tensor)


def identity_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors whose elements are the same memory."""
    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, *layout


def sample_of(tensor: torch.Tensor) -> bytes:
    """8 bytes: a digest of a plain CPU tensor's bytes at 512 places, or of all of them if it has no more.

    Different tensors on different ranks have different digests. A single changed byte is most likely missed.
    """
    memory = memory_of(tensor.resolve_conj().resolve_neg().contiguous())
    if len(memory) > _NUM_SAMPLES:
        memory = memory[(_PLACES * len(memory)).astype(np.int64)]
    return hashlib.blake2b(memory.data, digest_size=8).digest()


class TensorBytes:
    """The elements' bytes of a plain tensor on any device. `memory` is all of them, uint8 [N], if they lie in host
    memory in C order; `fixed` is, too, if the caller does not change them."""

    def __init__(self, tensor: torch.Tensor, *, is_fixed: bool = False) -> None:
        """`is_fixed`: the caller does not change the tensor while it is being saved."""
        self.num_bytes = tensor.numel() * tensor.itemsize
        self.device = tensor.device
        self.memory: NDArray[np.uint8] | None = None
        self._tensor = tensor
        is_lazy = tensor.is_conj() or tensor.is_neg()  # copying it resolves that
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy:
            self.memory = memory_of(tensor)
        elif tensor.itemsize in _SAME_BYTES and not is_lazy:
            self._tensor = tensor.view(_SAME_BYTES[tensor.itemsize])  # not every type can be copied with strides
        self.fixed = self.memory if is_fixed else None

    def copy(self, start: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; both begin and end with an element.

        In parts where the tensor is strided; what a device copies is there when this returns.
        """
        if self.memory is not None:
            np.copyto(target, self.memory[start : start + len(target)])  # releases the GIL
            return
        tensor, item = self._tensor, self._tensor.itemsize
        first, count, done = start // item, len(target) // item, 0
        for box in boxes_in(tuple(tensor.shape), first, first + count):
            part = tensor[box.slices]
            size = part.numel() * item
            _tensor_of(target[done : done + size], tensor.dtype).view(part.shape).copy_(part)
            done += size


def memory_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor on the CPU, not copied; of any dtype, also one that NumPy lacks."""
    data = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default device is
    offset = tensor.storage_offset() * tensor.itemsize
    data.set_(tensor.untyped_storage(), offset, (tensor.numel() * tensor.itemsize,), (1,))
    array: NDArray[np.uint8] = data.numpy()
    return array


def _tensor_of(memory: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype)
