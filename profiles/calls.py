"""How much of the package one thing passes through: python -m profiles.calls [--out profiles/results]

Counts calls of Python functions of loaderkit (comprehensions are none), in all threads, by `sys.setprofile`, and the files
that they lie in: of one chunk of four JPEGs in the middle of an epoch, of `restore(into=)` of three small tensors, and of
`build()` of a pipeline file. All modules have been imported before. And the CPU time that one picture takes in one thread
without those calls' kernels: decoding, resizing and normalising are left out, reading is not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import safetensors.torch
import torch

import loaderkit
from loaderkit import native
from loaderkit.engine.autotune.chunk_sizer import ChunkSizer
from loaderkit.engine.metrics import slow_samples
from profiles.overhead import endless, pictures
from profiles.record import record

CHUNK_SIZE = 4
PACKAGE = str(Path(loaderkit.__file__).parent)


class Passed(NamedTuple):
    """What was passed through: calls by (file, function)."""

    calls: Counter[tuple[str, str]]

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.calls})


@contextmanager
def counted() -> Iterator[Passed]:
    """Calls of the package's functions by this thread and by those that are begun in the meantime."""
    passed = Passed(Counter())

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.endswith(("comp>", "expr>")):
            passed.calls[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield passed
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def chunk() -> Passed:
    """What one chunk of `CHUNK_SIZE` samples passes through: the mean of those of half an epoch, without what fewer than nine
    in ten do (batches, reports, the slowest items, of which few are kept here: of many, the first thousands are)."""
    overrides = {"prefetch.concurrency": 1, "prefetch.executor": "thread"}
    always = patch.object(ChunkSizer, "next_chunk_size", lambda *_: CHUNK_SIZE)
    few = patch.object(slow_samples, "NUM_KEPT", 4)
    with always, few, counted() as passed, loaderkit.build(pictures(), overrides=overrides) as loader:
        batches = iter(loader)
        quarter = len(loader) // 4
        for _ in range(quarter):
            next(batches)
        passed.calls.clear()
        for _ in range(2 * quarter):
            next(batches)
        calls = passed.calls.copy()
    num_chunks = sum(count for (_, function), count in calls.items() if function == "Chunk.__init__")
    return Passed(Counter({at: round(count / num_chunks) for at, count in calls.items() if count > 0.9 * num_chunks}))


def python_us() -> float:
    """CPU time of a picture without decoder, resizer and normaliser, in us: the median of 25 times four batches, in chunks of
    12, which take 9 ms with them."""
    kernels: dict[str, Any] = {
        "decode_pieces": lambda jobs: [(0, job[2][3], 1e-6) for job in jobs],
        "resample": lambda jobs: None,
        "write_normalized": lambda *_: None,
    }
    overrides = {"prefetch.executor": "inline"}
    always = patch.object(ChunkSizer, "next_chunk_size", lambda *_: 12)
    with always, patch.multiple(native, **kernels), loaderkit.build(pictures(), overrides=overrides) as loader:
        batches, times = endless(loader), []
        for _ in range(26):
            begin_s = time.thread_time()
            for _ in range(4):
                next(batches)
            times.append((time.thread_time() - begin_s) / (4 * 64))
    return 1e6 * statistics.median(times[1:])


def restored(folder: Path) -> Passed:
    path = folder / "three.safetensors"
    state = {name: torch.randn(64, 64) for name in "abc"}
    safetensors.torch.save_file(state, path)
    into = {name: torch.zeros(64, 64) for name in "abc"}
    loaderkit.restore(path, into)  # imports what it needs
    with counted() as passed:
        loaderkit.restore(path, into)
    assert all(torch.equal(into[name], state[name]) for name in "abc")
    return passed


def built(folder: Path) -> Passed:
    path = folder / "pipeline.yaml"
    path.write_text(pictures().to_yaml())
    loaderkit.build(path).close()
    with counted() as passed:
        loader = loaderkit.build(path)
    loader.close()
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="print every function")
    args = parser.parse_args()
    found = {"chunk": chunk()}
    with tempfile.TemporaryDirectory() as name:
        found |= {"restore": restored(Path(name)), "build": built(Path(name))}
    for what, passed in found.items():
        print(f"{what}: {passed.num_calls} calls in {len(passed.files)} files")
        if args.list:
            for (file, function), count in passed.calls.most_common():
                print(f"  {count:6d}  {file}:{function}")
    rows = {what: {"calls": passed.num_calls, "files": len(passed.files)} for what, passed in found.items()}
    us = python_us()
    print(f"a picture without its kernels: {us:.1f} us of CPU time")
    record(args.out, "calls", **rows, picture_without_kernels_us=us)


if __name__ == "__main__":
    main()
