"""`transfer`: bring a batch's tensors to the training device.

`auto` is the current CUDA device where there is one and the CPU otherwise; on the CPU nothing is done. To CUDA, slabs are
pinned and copied on a stream of their own while the consumer works on earlier batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field

from loaderkit.schema import StageArgs


class TransferArgs(StageArgs):
    """Bring the batch to a device."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    channels_last: bool = Field(False, description="lay images and other [B, C, H, W] out as torch.channels_last there")
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = Field(
        None, description="cast floating-point tensors to this there; what is uint8 stays so"
    )


def resolve_device(wanted: str) -> torch.device:
    """The device meant by auto, cpu, cuda or cuda:N. Raises RuntimeError, saying what there is, if it is missing."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not num_devices):
        return torch.device("cpu")
    is_named = ":" in wanted
    number = int(wanted.partition(":")[2]) if is_named else torch.cuda.current_device() if num_devices else 0
    if number >= num_devices:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise RuntimeError(
            f"device {wanted!r} was asked for, but torch {torch.__version__}, {built}, sees {num_devices}"
        )
    return torch.device("cuda", number)


def shape(args: TransferArgs) -> Callable[[Any], Any] | None:
    """What `channels_last` and `dtype` do to a batch's values, where they are, also those in lists, tuples and dicts; None:
    nothing."""
    if not args.channels_last and args.dtype is None:
        return None
    dtype: torch.dtype | None = None if args.dtype is None else getattr(torch, args.dtype)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if args.channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return lambda value: _with_tensors(value, change)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed, also those in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _with_tensors(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, change) for item in value]
        named = hasattr(value, "_fields")
        return items if isinstance(value, list) else type(value)(*items) if named else tuple(items)
    return value


def transfer(device: torch.device) -> Callable[[dict[str, Any]], None]:
    """A batch stage that puts every tensor on the CUDA `device`, also those in lists, tuples and dicts.

    It returns when the copies are complete, so the pinned slab may be reused at once. The copies were allocated on the
    side stream; `record_stream` keeps their memory until the consumer's stream is done with them.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(batch: dict[str, Any]) -> None:
        moved: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(tensor.to(device, non_blocking=True))
            return moved[-1]

        with torch.cuda.stream(stream):
            batch.update({name: _with_tensors(value, move) for name, value in batch.items()})
        stream.synchronize()
        for tensor in moved:
            tensor.record_stream(torch.cuda.default_stream(device))

    return run
