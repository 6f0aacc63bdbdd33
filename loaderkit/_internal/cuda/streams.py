"""CUDA streams that are used again: a user takes one from the pool, and gives it back.

torch's allocator keeps freed memory for the stream that it was allocated on, and `torch.cuda.Stream()` gives out 32
streams in turn. If each loader and each restore took a new stream, its memory would stay with that stream, and no later
one would find it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class StreamPool:
    """The unused streams of each device. Any thread, also in a destructor: there is no lock."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Any]] = {}

    def take(self, device: torch.device) -> Any:
        """A stream of the device; the one given back last, if there is one. What was started on it may still run."""
        try:
            return self._free[device].pop()
        except (KeyError, IndexError):
            return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def give_back(self, device: torch.device, stream: Any) -> None:
        """Let others take the stream from now on."""
        self._free.setdefault(device, []).append(stream)


STREAMS = StreamPool()
"""The pool of this process, as the allocator's memory belongs to the process."""


class DeviceStreams:
    """A stream on each of some CUDA devices, for copies that do not wait for what the training starts later. Several threads
    may use it at once. Close it."""

    def __init__(self, devices: Iterable[torch.device], pool: StreamPool = STREAMS) -> None:
        """Of `devices`, those that are no CUDA devices have no stream."""
        cuda = {device for device in devices if device.type == "cuda"}
        self._streams = {device: pool.take(device) for device in sorted(cuda, key=str)}
        self._finalizer = weakref.finalize(self, _give_back, pool, self._streams)

    @property
    def device(self) -> torch.device | None:
        """One of the devices, or None if there is none."""
        return next(iter(self._streams), None)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make them the current streams of this thread. All that the thread starts on them has ended when the block
        ends, also by an error, so memory that was copied from may be written to then."""
        with ExitStack() as entered:
            for device, stream in self._streams.items():
                # With another device current, leaving the stream would begin a context there: on GPU 0 in every rank.
                entered.enter_context(torch.cuda.device(device))
                entered.enter_context(torch.cuda.stream(stream))
                # New tensors are made on the default stream, in memory that kernels on it may still use.
                stream.wait_stream(torch.cuda.default_stream(device))
            try:
                yield
            finally:
                for stream in self._streams.values():
                    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    done.record(stream)
                    done.synchronize()  # not the stream: other threads may have more to do on it

    def close(self) -> None:
        """Give the streams back. Idempotent."""
        self._finalizer()


def _give_back(pool: StreamPool, streams: dict[torch.device, Any]) -> None:
    for device, stream in streams.items():
        pool.give_back(device, stream)
