"""Restoring a checkpoint into tensors on the GPU, beside safetensors' own reader and bare reads through pinned memory."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import loaderkit
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.checkpoint import write_manifest
from profiles.gpu_session.context import Context
from profiles.gpu_session.copies import pinned_rate

State = dict[str, torch.Tensor]
_SHARE = 0.9
_PART = 16 * 2**20


def made_state(context: Context, num_bytes: int) -> State:
    """Tensors of float32 such as a transformer has, random, on the device."""
    generator = torch.Generator(context.device).manual_seed(0)
    width = context.sized(4096, 128)
    shapes = {"qkv": (3 * width, width), "out": (width, width), "mlp": (4 * width, width), "norm": (width,)}
    layer_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    return {
        f"layers.{layer}.{name}": torch.rand(shape, generator=generator, device=context.device)
        for layer in range(max(1, round(num_bytes / layer_bytes)))
        for name, shape in shapes.items()
    }


def measure(context: Context) -> None:
    """8 GB from memory, with and without checksums."""
    num_bytes = context.sized(8 * 10**9, 10**7)
    with context.folder(num_bytes) as folder:
        state = made_state(context, num_bytes)
        path = folder / "plain" / "model.safetensors"
        checked = folder / "checked" / path.name
        for place in (path, checked):
            place.parent.mkdir()
        begin_s = time.perf_counter()
        safetensors.torch.save_file({name: tensor.cpu() for name, tensor in state.items()}, path)
        os.link(path, checked)
        write_manifest(checked.parent)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        context.report.add(state_bytes=num_bytes, num_tensors=len(state), written_s=time.perf_counter() - begin_s)
        _in_turns(context, state, path, checked, num_bytes)


def _in_turns(context: Context, state: State, path: Path, checked: Path, num_bytes: int) -> None:
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def load_file() -> None:
        into.update(safetensors.torch.load_file(path, device=str(context.device)))

    bare = BareReads(context, path, num_bytes)
    runs: dict[str, Callable[[], Any]] = {
        "unchecked": lambda: loaderkit.restore(path, into),
        "checked": lambda: loaderkit.restore(checked.parent, into, verify=True),
        "new": lambda: into.update(loaderkit.restore(path, device=context.device)),
        "safetensors": load_file,
        "bare_reads": bare.read,
    }
    taken_s: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(context.sized(4, 1)):
        for name, run in runs.items():
            if name in ("safetensors", "new") and number > 1:  # seconds each, which change little
                continue
            for tensor in into.values():
                tensor.zero_()
            context.wait()
            begin_s = time.perf_counter()
            run()
            context.wait()
            taken_s[name].append(time.perf_counter() - begin_s)
            if number == 0 and name != "bare_reads":
                wrong = [key for key, tensor in state.items() if not torch.equal(into[key], tensor)]
                assert not wrong, f"{name}: {wrong[0]} and {len(wrong) - 1} more are not what was saved"
    for name, seconds in taken_s.items():
        rest = seconds[1:] or seconds
        context.report.add(
            **{f"{name}_first_s": seconds[0], f"{name}_bytes_per_s": num_bytes / statistics.median(rest)}
        )
    if context.on_gpu:
        bus = pinned_rate(context, 256_000_000)
        context.report.add(bus_bytes_per_s=bus)
        for name in ("unchecked", "checked"):
            context.report.bar(
                f"{name}_share_of_bus", context.report.figures[f"{name}_bytes_per_s"] / bus, least=_SHARE
            )
        context.report.add(bare_reads_share_of_bus=context.report.figures["bare_reads_bytes_per_s"] / bus)


class BareReads:
    """The file's bytes into one tensor on the device, by some threads with two pinned buffers each: what the machine can do."""

    def __init__(self, context: Context, path: Path, num_bytes: int) -> None:
        self._context, self._path = context, path
        self._num_bytes = num_bytes
        self._target = torch.empty(_PART * 2, dtype=torch.uint8, device=context.device)
        self._num_threads = min(8, num_cpus())
        self._lock = threading.Lock()
        self._buffers = [
            [torch.empty(_PART, dtype=torch.uint8, pin_memory=context.on_gpu) for _ in range(2)]
            for _ in range(self._num_threads)
        ]

    def read(self) -> None:
        """Every byte once."""
        self._next = 0
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(self._share, self._buffers))

    def _take(self) -> int:
        with self._lock:
            begin, self._next = self._next, self._next + _PART
        return begin

    def _share(self, buffers: list[torch.Tensor]) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        cuda: Any = torch.cuda
        stream = cuda.Stream(self._context.device) if self._context.on_gpu else None
        copied = [None if stream is None else cuda.Event() for _ in buffers]
        number = 0
        while (begin := self._take()) < self._num_bytes:
            buffer, event = buffers[number % 2], copied[number % 2]
            if event is not None:
                event.synchronize()
            size = os.preadv(descriptor, [buffer.numpy().data], begin)
            if stream is not None and event is not None:
                with torch.cuda.stream(stream):
                    self._target[:size].copy_(buffer[:size], non_blocking=True)
                    event.record(stream)
            else:
                self._target[:size].copy_(buffer[:size])
            number += 1
        os.close(descriptor)
        if stream is not None:
            stream.synchronize()
