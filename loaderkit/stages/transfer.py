"""`transfer`: bring a batch's tensors to the training device.

`auto` is the current CUDA device where there is one and the CPU otherwise; on the CPU nothing is done. To CUDA, slabs are
pinned and copied on a stream of their own while the consumer works on earlier batches, and what follows happens there, too.
"""

from __future__ import annotations

import copy
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field

from loaderkit._internal.device import resolve_device
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError
from loaderkit.stages.base import BatchContext, StageArgs, StageConfig, StageKind
from loaderkit.stages.context import CompileContext

logger = logging.getLogger("loaderkit")


class TransferArgs(StageArgs):
    """Bring the batch to a device."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    channels_last: bool = Field(False, description="lay images and other [B, C, H, W] out as torch.channels_last there")
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = Field(
        None, description="cast floating-point tensors to this there; what is uint8 stays so"
    )


def shape(args: TransferArgs) -> Callable[[Any], Any] | None:
    """What `channels_last` and `dtype` do to a batch's values, where they are, also those in lists, tuples and dicts; None:
    nothing."""
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
    """`value` with every tensor in it changed, also those in lists, tuples and dicts, whose types stay what they are; one in
    which nothing changes is returned itself."""
    if isinstance(value, str):  # a batch has more keys than anything else
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {name: _with_tensors(item, change) for name, item in value.items()}
        return value if all(changed[name] is item for name, item in value.items()) else _refilled(value, changed)
    if isinstance(value, (list, tuple)):
        if isinstance(value, torch.nn.utils.rnn.PackedSequence):
            data, indices, inverse = (_with_tensors(item, change) for item in (value.data, *value[2:]))
            # Torch wants the sizes on the CPU, wherever the rest is.
            return torch.nn.utils.rnn.PackedSequence(data, value.batch_sizes, indices, inverse)
        items = [_with_tensors(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else _refilled(value, items)
    return value


def _refilled(value: Any, items: Any) -> Any:
    """A container of the same type, and with the same attributes, that holds `items`; one of plain type where that type
    cannot be filled."""
    kind = next(kind for kind in (dict, list, tuple) if isinstance(value, kind))
    if type(value) is kind:
        return kind(items)
    try:
        found = _remade_tuple(value, items) if kind is tuple else copy.copy(value)
        if found is value:
            return kind(items)
        if getattr(value, "__dict__", None) is value:  # its items are its attributes
            found.__dict__ = found
        if kind is dict:
            found.clear()
            for name, item in items.items():  # as a user would, since some note their items elsewhere as well
                found[name] = item
        elif kind is list:
            found[:] = items
    except Exception:  # whatever a type raises that is not to be changed
        return kind(items)
    return found


def _remade_tuple(value: Any, items: list[Any]) -> Any:
    """Not by calling its type, which may make something else of its arguments; but for torch's own, which cannot be made in
    another way."""
    if hasattr(type(value), "n_sequence_fields"):
        return type(value)(items)
    found: Any = tuple.__new__(type(value), items)
    if hasattr(found, "__dict__"):
        found.__dict__.update(vars(value))
    return found


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors whose memory a tensor is made of: itself, or what a sparse or nested one consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.is_nested:
        jagged: Any = tensor
        found = (
            (jagged.values(), jagged.offsets(), jagged.lengths())
            if tensor.layout is torch.jagged
            else (jagged.values(),)
        )
        return tuple(part for part in found if part is not None)
    names = _DENSE_PARTS.get(str(tensor.layout))
    return (tensor,) if names is None else tuple(getattr(tensor, name)() for name in names)


def _is_pageable(tensor: torch.Tensor) -> bool:
    """Whether it is worth a copy within the CPU's memory that the device can fetch it from there by itself."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.nbytes >= _LEAST_PINNED
        and not tensor.is_pinned()
    )


def cannot_pin(error: RuntimeError) -> bool:
    """Whether this says that no memory can be pinned, and not what a kernel has done, of which whatever comes next is told."""
    return any(text in str(error) for text in ("out of memory", "not supported", "OS call failed"))


NOT_PINNED = "memory of batches cannot be pinned (%s): copies to the GPU are slower, and hold up a worker"


_DENSE_PARTS = {
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
# What is smaller is on its way before a copy within memory would be made.
_LEAST_PINNED = 64 * 2**10


class TransferStream:
    """A CUDA stream of a loader's own: what workers do from `transfer` on, they do there, beside what the loop has under way.

    A worker waits, without using the CPU, for what it has put on the stream before it lets go of the batch. So the slab that
    was copied may be filled again at once, and a batch that is delivered may be used on any stream.
    """

    def __init__(self, device: torch.device) -> None:
        """In the thread that builds the loader: tensors that its current stream still makes may be used by functions."""
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._lock = threading.Lock()
        self._copies = (0, 0.0)
        self._can_pin = True

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the stream current, and its device: in a thread of ours that is number 0, and what asks for no other device
        would make a CUDA context there, in every rank's process."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def run(self, act: Callable[..., Any], *args: Any) -> Any:
        """What `act` returns, called on the stream, when the device has done what that asked for."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._current():
            found = act(*args)
            done.record(self._stream)
            done.synchronize()
        return found

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, to be called in another thread than `run` is, but on the same stream."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._current():
                return function(*args, **kwargs)

        return call

    def move(self, batch: dict[str, Any]) -> None:
        """Put every tensor of a batch on the device, also those in lists, tuples and dicts; return when they are there.

        What is large and not pinned is pinned first: otherwise this thread, and others' copies, would wait for the copy.
        """
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        num_bytes = 0

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_bytes
            found = tensor.to(self.device, non_blocking=True)
            num_bytes += 0 if found is tensor else sum(part.nbytes for part in _dense_parts(tensor))
            return found

        with self._current():
            pinned = {name: _with_tensors(value, self._pinned) for name, value in batch.items()}
            with self._lock:  # nobody else's copies come between the events
                begin.record(self._stream)
                moved = {name: _with_tensors(value, copied) for name, value in pinned.items()}
                end.record(self._stream)
            end.synchronize()
            copy_s = begin.elapsed_time(end) / 1000
        batch.update(moved)  # not before: with the last tensor that sees it a slab may be filled again
        with self._lock:
            self._copies = (self._copies[0] + num_bytes, self._copies[1] + copy_s)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._can_pin and _is_pageable(tensor):
            try:
                # Not `pin_memory`, which copies the gaps of a view as well, and no tensor whose elements lie on one another.
                return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            except RuntimeError as error:
                if not cannot_pin(error):
                    raise
                self._can_pin = False
                logger.warning(NOT_PINNED, str(error).partition("\n")[0])
        return tensor

    def hand_over(self, batch: dict[str, Any]) -> None:
        """In the loop's thread: its current stream works on the batch from here on, also after the loop has dropped it."""
        stream = torch.cuda.current_stream(self.device)

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:
                current = stream if tensor.device == self.device else torch.cuda.current_stream(tensor.device)
                for part in _dense_parts(tensor):
                    part.record_stream(current)
            return tensor

        for value in batch.values():
            _with_tensors(value, note)

    def counters(self) -> dict[str, float]:
        """What was copied, in bytes, and how long the device took over it, in s, by its own clock (CUDA events)."""
        num_bytes, copy_s = self._copies
        return {"num_bytes": num_bytes, "copy_s": copy_s}


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
    stream=_open_stream,
    keeps_values=lambda args: args.dtype is None,
)
