"""`transfer`: copy a batch's tensors to the training device.

`auto` is the current CUDA device if there is one, else the CPU, where nothing is done. To CUDA, slabs are pinned and copied on
a separate stream while the consumer works on earlier batches; the stages after it run on that stream too.
"""

from __future__ import annotations

import copy
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field

from loaderkit._internal.cuda.device import resolve_device
from loaderkit._internal.cuda.pinned import NOT_PINNED, cannot_pin
from loaderkit._internal.cuda.streams import STREAMS
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError
from loaderkit.samples.chunk import BatchContext
from loaderkit.stages.base import StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.gpu_copies import LEAST_PINNED, BatchCopies, CopyAccount, dense_parts

logger = logging.getLogger("loaderkit")


class TransferArgs(StageArgs):
    """Copy the batch to a device."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    channels_last: bool = Field(
        False, description="convert images and other [B, C, H, W] to torch.channels_last on the device"
    )
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = Field(
        None, description="cast floating-point tensors to this on the device; uint8 stays uint8"
    )


def shape(args: TransferArgs) -> Callable[[Any], Any] | None:
    """A function that applies `channels_last` and `dtype` to the tensors of a value, also in lists, tuples and dicts; None if
    neither is set."""
    if not args.channels_last and args.dtype is None:
        return None
    dtype: torch.dtype | None = None if args.dtype is None else getattr(torch, args.dtype)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if args.channels_last and tensor.ndim == 4 and tensor.layout is torch.strided:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return lambda value: _with_tensors(value, change)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed, also in lists, tuples and dicts, whose types are kept; the same object if no
    tensor changes."""
    if isinstance(value, str):  # the most frequent type, for the keys of a batch
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {name: _with_tensors(item, change) for name, item in value.items()}
        return value if all(changed[name] is item for name, item in value.items()) else _refilled(value, changed)
    if isinstance(value, (list, tuple)):
        if isinstance(value, torch.nn.utils.rnn.PackedSequence):
            data, indices, inverse = (_with_tensors(item, change) for item in (value.data, *value[2:]))
            # Torch requires the sizes on the CPU.
            return torch.nn.utils.rnn.PackedSequence(data, value.batch_sizes, indices, inverse)
        items = [_with_tensors(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else _refilled(value, items)
    return value


def _refilled(value: Any, items: Any) -> Any:
    """A container of the same type and attributes that holds `items`; a plain dict, list or tuple if that type cannot be
    filled."""
    kind = next(kind for kind in (dict, list, tuple) if isinstance(value, kind))
    if type(value) is kind:
        return kind(items)
    try:
        container = _refilled_tuple(value, items) if kind is tuple else copy.copy(value)
        if container is value:
            return kind(items)
        if getattr(value, "__dict__", None) is value:  # its items are its attributes
            container.__dict__ = container
        if kind is dict:
            container.clear()
            for name, item in items.items():  # by __setitem__, which subclasses may override
                container[name] = item
        elif kind is list:
            container[:] = items
    except Exception:  # an immutable type may raise anything
        return kind(items)
    return container


def _refilled_tuple(value: Any, items: list[Any]) -> Any:
    """A tuple of the same type, made without its constructor, which may take other arguments; torch's own types need it."""
    if hasattr(type(value), "n_sequence_fields"):
        return type(value)(items)
    refilled: Any = tuple.__new__(type(value), items)
    if hasattr(refilled, "__dict__"):
        refilled.__dict__.update(vars(value))
    return refilled


def _is_pageable(tensor: torch.Tensor) -> bool:
    """True if pinning a tensor first, which is a copy in memory, pays."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.nbytes >= LEAST_PINNED
        and not tensor.is_pinned()
    )


class TransferStream:
    """A loader's CUDA stream, on which workers run `transfer` and all later stages, concurrently with the training loop.

    A worker waits, without using the CPU, until its work on the stream is done. So the copied slab may be refilled at once,
    and a delivered batch may be used on any stream. Close it.
    """

    def __init__(self, device: torch.device) -> None:
        """Called in the thread that builds the loader: its current stream may still compute tensors that functions use."""
        self.device = device
        self._stream = STREAMS.take(device)
        self._finalizer = weakref.finalize(self, STREAMS.give_back, device, self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._lock = threading.Lock()
        self._account = CopyAccount()
        self._num_working = 0  # workers that may ask for something on the stream
        self._can_pin = True

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the stream and its device current: a new thread's device is number 0, and using it would create a CUDA context
        there in every rank's process."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def _counted(self, change: int) -> Iterator[None]:
        with self._lock:
            self._num_working += change
        try:
            yield
        finally:
            with self._lock:
                self._num_working -= change

    def run(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call `act` on the stream; returns its result once the device has finished its work."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._counted(1), self._current():
            result = act(*args)
            done.record(self._stream)
            done.synchronize()
        return result

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, bound to the stream, for calls in a thread other than the one of `run`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._current():
                return function(*args, **kwargs)

        return call

    def move(self, batch: dict[str, Any]) -> None:
        """Copy every tensor of a batch to the device, also in lists, tuples and dicts; returns when they are there. It is timed
        if no other stage works on the stream.

        A large tensor that is not pinned is pinned first; otherwise its copy would block this thread and other copies.
        """
        with self._current():
            pinned = {name: _with_tensors(value, self._pinned) for name, value in batch.items()}
            copies = BatchCopies(self.device)
            moved = {name: _with_tensors(value, copies.add) for name, value in pinned.items()}
            with self._counted(-1):  # this worker asks for nothing until they are there
                with self._lock:  # no other copies, and no other stage begins
                    copies.start(self._stream, timed=self._num_working == 0)
                timed = copies.wait()
        batch.update(moved)  # not before: a slab without tensors on it may be refilled
        self._account.copied(batch, copies.num_bytes, timed)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._can_pin and _is_pageable(tensor):
            try:
                # Not `pin_memory`, which also copies the gaps of a view, and refuses overlapping elements.
                return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            except RuntimeError as error:
                if not cannot_pin(error):
                    raise
                self._can_pin = False
                logger.warning(NOT_PINNED, str(error).partition("\n")[0])
        return tensor

    def hand_over(self, batch: dict[str, Any], asked_s: float) -> None:
        """Called in the loop's thread, which asked for the batch at `asked_s` by `time.perf_counter`: record that its current
        stream uses the batch, even after the loop dropped it."""
        self._account.taken(batch, asked_s)
        stream = torch.cuda.current_stream(self.device)

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                current = stream if tensor.device == self.device else torch.cuda.current_stream(tensor.device)
                for part in dense_parts(tensor):
                    part.record_stream(current)
            return tensor

        for value in batch.values():
            _with_tensors(value, note)

    def counters(self) -> dict[str, float]:
        """See `CopyAccount`."""
        return self._account.counters()

    def close(self) -> None:
        """Give the stream back, for the next loader: the memory of batches is kept for it. Idempotent."""
        self._finalizer()


def _open_stream(args: TransferArgs) -> TransferStream | None:
    """The stream to the device, if that is a GPU. Raises ConfigError."""
    if args.device == "cpu":
        return None
    try:
        device = resolve_device(args.device)
    except RuntimeError as error:
        raise ConfigError(f"stages.transfer.device: {error}") from error
    return TransferStream(device) if device.type == "cuda" else None


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, TransferArgs)
    stream, change = context.stream, shape(stage.args)

    def run(batch: dict[str, Any], context: BatchContext) -> None:
        if stream is not None:
            stream.move(batch)
        if change is not None:
            batch.update({name: change(value) for name, value in batch.items()})

    return stage.ready("batch", run)


TRANSFER = StageKind(
    TransferArgs,
    "batch",
    compile=_compile,
    takes_tensors=True,
    is_contained=True,
    stream=_open_stream,
    keeps_values=lambda args: args.dtype is None,
)
