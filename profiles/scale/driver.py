"""What the trainer's process spends on a batch: CPU time of the loop and of the whole process, by executor and size."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import loaderkit
from loaderkit import Pipeline

RECORD_BYTES = 1 << 16
BATCHES = (1, 16, 256)  # records: 64 KiB, 1 MiB, 16 MiB
EXECUTORS: dict[str, dict[str, Any]] = {
    "thread": {"executor": "thread", "concurrency": 1},
    "process": {"executor": "process", "processes": 1, "concurrency": 1},
    "process, 4": {"executor": "process", "processes": 4, "concurrency": 4},
}
_NUM_RECORDS = 4096
_MOST_BYTES = 3 << 30  # passed on in a window
_WINDOWS = 5


def measure(executors: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """A row for every executor and size of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.bin"
        np.zeros(_NUM_RECORDS * RECORD_BYTES, np.uint8).tofile(path)
        return [
            one(path, name, overrides, size) for name, overrides in (executors or EXECUTORS).items() for size in BATCHES
        ]


def one(path: Path, name: str, overrides: dict[str, Any], size: int) -> dict[str, Any]:
    """The medians over windows of batches, in seconds a batch, once as many have come as are kept anywhere."""
    pipeline = Pipeline.array(path, dtype="uint8", shape=[RECORD_BYTES]).read().batch(size, drop_last=True)
    settings = {f"prefetch.{key}": value for key, value in overrides.items()}
    num = max(20, min(2000, _MOST_BYTES // _WINDOWS // (size * RECORD_BYTES)))
    loop_s, own_s, touch_s = [], [], []
    with loaderkit.build(pipeline, overrides={"prefetch.batches": 8, **settings}) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(64):
            next(batches)
        for _ in range(_WINDOWS):
            before = (time.thread_time(), process_s())
            for _ in range(num):
                batch = next(batches)
            loop_s.append((time.thread_time() - before[0]) / num)
            own_s.append((process_s() - before[1]) / num)
            begin_s = time.thread_time()
            for _ in range(8):  # one byte of each page: what it costs the loop that memory is another process's
                batch = next(batches)
                values = next(value for key, value in batch.items() if not key.startswith("__"))
                values.view(-1)[::4096].sum()
            touch_s.append(max(0.0, (time.thread_time() - begin_s) / 8 - loop_s[-1]))
            del batch, values
    return {
        "executor": name,
        "batch_bytes": size * RECORD_BYTES,
        "loop_s": statistics.median(loop_s),
        "process_s": statistics.median(own_s),
        "touch_s": statistics.median(touch_s),
        "num_batches": num * _WINDOWS,
    }


def process_s() -> float:
    """CPU time of this process so far; of all its threads, those of C included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpus() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))
