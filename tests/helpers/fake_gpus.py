"""GPUs in the CPU's memory, whose copies are made as late as CUDA allows: when somebody waits for them.

`torch.cuda` and the tensors' methods are replaced as far as checkpoints use them. What is copied from memory that has been
written to since has the wrong bytes then, as on a device; and it is noted on which devices a context began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from loaderkit._internal.cuda.streams import STREAMS

_DEVICE: Any = torch.Tensor.device
_IS_CPU: Any = torch.Tensor.is_cpu


def _nothing() -> None: ...


class FakeStream:
    """Work that is done in order, once it is waited for."""

    def __init__(self, gpus: FakeGpus, device: torch.device) -> None:
        self.device = device
        self._gpus = gpus
        self._queued: list[Callable[[], Any]] = []
        self._num_done = 0

    def put(self, act: Callable[[], Any]) -> None:
        self._queued.append(act)

    def run(self, end: int | None = None) -> None:
        """Do the first `end` things, or all."""
        with self._gpus.lock:
            while self._num_done < (len(self._queued) if end is None else end):
                act, self._queued[self._num_done] = self._queued[self._num_done], _nothing  # it may hold memory
                self._num_done += 1
                act()

    def synchronize(self) -> None:
        self.run()

    def wait_stream(self, other: FakeStream) -> None:
        end = len(other._queued)
        self.put(lambda: other.run(end))

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_left(self) -> int:
        return len(self._queued) - self._num_done


class FakeEvent:
    def __init__(self, **settings: Any) -> None:
        self._at: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self._at = stream, stream.num_queued

    def synchronize(self) -> None:
        assert self._at is not None
        self._at[0].run(self._at[1])


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, FakeStream] = {}


class FakeGpus:
    """`num_gpus` of them, inside of `installed`."""

    def __init__(self, num_gpus: int = 3, most_pinned: int | None = None) -> None:
        """`most_pinned`: bytes that may be registered; None: any."""
        self.lock = threading.RLock()
        self.devices = [torch.device("cuda", number) for number in range(num_gpus)]
        self.contexts: set[int] = set()  # where one has begun
        self.streams: list[FakeStream] = []  # that were made
        self.registered: dict[int, int] = {}  # bytes by address
        self.num_registered = 0  # so far
        self.copies: list[tuple[torch.device, FakeStream, bool]] = []  # with whether host memory was pinned
        self.handed_over: list[tuple[int, FakeStream]] = []  # (address, stream)
        self.on_register: Callable[[int], None] = lambda number: None
        self._most_pinned = most_pinned
        self._default = {device.index: FakeStream(self, device) for device in self.devices}
        self._thread = _Thread()
        self._memory: dict[int, tuple[torch.device, torch.Tensor]] = {}  # by the address of a storage

    def put(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor, which lies on a GPU from now on."""
        self._memory[tensor.untyped_storage().data_ptr()] = self.devices[number], tensor
        return tensor

    def finish(self) -> None:
        """Do all that is left."""
        for stream in (*self._default.values(), *self.streams):
            stream.run()

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        held = self._memory.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        device: torch.device = _DEVICE.__get__(tensor) if held is None else held[0]
        return device

    # ------------------------------------------------------------------------------------------------- torch.cuda

    def _set_device(self, number: int) -> None:
        self.contexts.add(number)
        self._thread.device = number

    def current_stream(self, device: Any = None) -> FakeStream:
        number = self._thread.device if device is None else torch.device(device).index
        return self._thread.streams.get(number, self._default[number])

    def _set_stream(self, stream: FakeStream) -> None:
        if self._thread.device != stream.device.index:
            self._set_device(stream.device.index)
        self._thread.streams[stream.device.index] = stream

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before = self._thread.device
        self._set_device(torch.device(device).index)
        yield
        if before in self.contexts:  # torch begins none for going back
            self._thread.device = before

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, there = self.current_stream(), self.current_stream(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.device != stream.device:
                self._set_stream(there)
            self._set_stream(before)

    def _new_stream(self, device: Any) -> FakeStream:
        self.streams.append(FakeStream(self, torch.device(device)))
        return self.streams[-1]

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.contexts.add(self._thread.device)
        self.on_register(self.num_registered)
        with self.lock:
            if self._most_pinned is not None and sum(self.registered.values()) + num_bytes > self._most_pinned:
                return 2
            assert not any(lo < address + num_bytes and address < lo + size for lo, size in self.registered.items())
            self.registered[address] = num_bytes
            self.num_registered += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.contexts.add(self._thread.device)
        return 0 if self.registered.pop(address, None) is not None else 713

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        """Raises as CUDA does for a copy whose memory is not in one registration, or in none."""
        begin = tensor.data_ptr()
        end = (
            begin + (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
        )
        touched = [(lo, lo + size) for lo, size in self.registered.items() if lo < end and begin < lo + size]
        if touched and not (touched[0][0] <= begin and end <= touched[0][1]):
            raise RuntimeError("CUDA error: invalid argument")
        return bool(touched)

    # ---------------------------------------------------------------------------------------------------- tensors

    @contextmanager
    def installed(self) -> Iterator[FakeGpus]:
        """They are what torch has, until the end of the block."""
        copy, empty, ones = torch.Tensor.copy_, torch.empty, torch.ones
        to: Any = torch.Tensor.to

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            there = target if target.is_cuda else source
            if not there.is_cuda:
                return copy(target, source)
            stream, host = self.current_stream(there.device), source if target.is_cuda else target
            self.contexts.add(there.device.index)
            pinned = not host.is_cuda and host.numel() > 0 and self._is_pinned(host)
            self.copies.append((there.device, stream, pinned))
            stream.put(lambda: copy(target, source))
            if not non_blocking:
                stream.run()
            return target

        def to_(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
                made = self.put(empty(tensor.shape, dtype=tensor.dtype), args[0].index)
                return copy_(made, tensor, non_blocking)
            return to(tensor, *args, non_blocking=non_blocking, **kwargs)

        def make(function: Any) -> Any:
            def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
                wanted = None if device is None else torch.device(device)
                if wanted is not None and wanted.type == "cuda":
                    return self.put(function(*args, **kwargs), wanted.index or 0)
                return function(*args, device=device, **kwargs)

            return made

        def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
            self.handed_over.append((tensor.data_ptr(), stream))

        of_cuda = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.devices),
            "current_device": lambda: self._thread.device,
            "current_stream": self.current_stream,
            "default_stream": lambda device: self._default[torch.device(device).index],
            "device": self._device,
            "stream": self._stream,
            "Stream": self._new_stream,
            "Event": FakeEvent,
            "cudart": lambda: self,
        }
        of_tensors = {
            "device": property(self.device_of),
            "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
            "is_cpu": property(lambda tensor: _IS_CPU.__get__(tensor) and not tensor.is_cuda),
            "copy_": copy_,
            "to": to_,
            "record_stream": record_stream,
        }
        with ExitStack() as patched:
            for name, value in of_cuda.items():
                patched.enter_context(patch.object(torch.cuda, name, value))
            for name, value in of_tensors.items():
                patched.enter_context(patch.object(torch.Tensor, name, value))
            patched.enter_context(patch.object(torch, "empty", make(empty)))
            patched.enter_context(patch.object(torch, "ones", make(ones)))
            patched.enter_context(patch.object(STREAMS, "_free", {}))
            yield self
