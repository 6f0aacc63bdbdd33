"""Saving from the GPU while training goes on: the pause, and whether what is restored is the state of the moment."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.restoring import State, made_state

_PAUSE = 1.1
_NUM_SAVES = 4  # the first two make the memory that those after them use


def measure(context: Context) -> None:
    """4 GB, flushed by threads and by a process."""
    num_bytes = context.sized(4 * 10**9, 10**7)
    with context.folder(2 * num_bytes) as folder:
        state = made_state(context, num_bytes)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        context.report.add(state_bytes=num_bytes, num_tensors=len(state))
        copy = BareCopy(context, state)
        copy.seconds()
        bare_s = statistics.median(copy.seconds() for _ in range(5))
        context.report.add(bare_copy_s=bare_s, bare_copy_bytes_per_s=num_bytes / bare_s)
        del copy
        for flush in ("thread", "process"):
            pause_s = _saves(context, state, folder / flush, flush)
            name = f"{flush}_pause_over_bare_copy"
            if context.on_gpu:
                context.report.bar(name, pause_s / bare_s, most=_PAUSE)
            else:
                context.report.add(**{name: pause_s / bare_s})


class BareCopy:
    """The same tensors to pinned memory that is kept."""

    def __init__(self, context: Context, state: State) -> None:
        self._context = context
        self._pairs = [
            (torch.empty_like(tensor, device="cpu", pin_memory=context.on_gpu), tensor) for tensor in state.values()
        ]

    def seconds(self) -> float:
        self._context.wait()
        begin_s = time.perf_counter()
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        self._context.wait()
        return time.perf_counter() - begin_s


def _saves(context: Context, state: State, folder: Path, flush: str) -> float:
    """Seconds of the pause of the saves behind the first two."""
    pauses_s, flushes_s = [], []
    cuda: Any = torch.cuda
    streams = [cuda.Stream(context.device) if context.on_gpu else None for _ in range(2)]
    with loaderkit.CheckpointManager(folder, flush=flush, keep={"last": 1}) as manager:
        for step in range(1, _NUM_SAVES + 1):
            _work(context, state)
            of_the_moment = {name: tensor.clone() for name, tensor in state.items()}
            context.wait()
            begin_s = time.perf_counter()
            saving = manager.save(step, state)
            pauses_s.append(time.perf_counter() - begin_s)
            for stream, tensors in zip(streams, (list(state.values())[0::2], list(state.values())[1::2]), strict=True):
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    for tensor in tensors:
                        tensor.fill_(-step)
            assert saving is not None
            saving.wait()
            flushes_s.append(saving.stats["flush_s"])
            if context.on_gpu:
                torch.cuda.synchronize()
            _check(manager, of_the_moment, step, flush)
            for name, tensor in of_the_moment.items():
                state[name].copy_(tensor)
            context.report.add(
                **{f"{flush}_pauses_s": [round(pause_s, 4) for pause_s in pauses_s], f"{flush}_flush_s": flushes_s[-1]}
            )
    pause_s = statistics.median(pauses_s[2:])
    context.report.add(**{f"{flush}_pause_s": pause_s, f"{flush}_first_pause_s": pauses_s[0]})
    return pause_s


def _work(context: Context, state: State) -> None:
    """What training has given to the device and is not done when `save` is called."""
    if context.on_gpu:
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    for tensor in state.values():
        tensor.add_(1.0)


def _check(manager: loaderkit.CheckpointManager, wanted: State, step: int, flush: str) -> None:
    """Restore beside the state, and compare."""
    restored: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    assert manager.restore(restored) == step
    wrong = [name for name, tensor in wanted.items() if not torch.equal(restored[name], tensor)]
    assert not wrong, f"flush: {flush}, step {step}: {wrong[0]} and {len(wrong) - 1} more are not those of the moment"
