"""What the upload of a checkpoint costs a training loop that runs beside it: one thread of small products, in steps per second.

    python -m profiles.uploads --gigabytes 0.5 --rounds 5 [--near /dev/shm] [--folder /data] [--out profiles/results]

Contestants take turns within a round, the order changed from round to round: the loop alone; beside an upload; beside one whose
speed is bounded; and beside threads, as many, that copy the same bytes with bare reads and writes past the page cache. What is
compared is the ratio within a round. CPU seconds of an upload are measured without the loop.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

import loaderkit
from loaderkit.checkpoint.manager.bandwidth import Bandwidth
from loaderkit.checkpoint.manager.settings import parse_speed
from loaderkit.checkpoint.save.copy import copy_checkpoint
from profiles.record import record

_PART = 8 * 2**20
_ALONE_S = 3.0
warnings.filterwarnings("ignore")


def upload(source: Path, to: Path, speed: int | None) -> None:
    """As the thread of a `CheckpointManager` does it."""
    copy_checkpoint(source, to, pace=Bandwidth(speed).wait, replace=True, direct=True)


def bare(source: Path, to: Path) -> None:
    """Copy the files of a checkpoint, part by part, by as many threads as there are CPUs, and make them durable."""
    to.mkdir(parents=True)

    num_threads = max(2, os.cpu_count() or 2)
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(num_threads):
        buffers.put(mmap.mmap(-1, _PART))

    def copy(read: int, written: int, start: int) -> None:
        buffer = buffers.get()
        num_read = os.preadv(read, [buffer], start)
        os.pwrite(written, memoryview(buffer)[: -(-num_read // 4096) * 4096], start)
        buffers.put(buffer)

    for path in source.iterdir():
        flags = 0 if path.stat().st_size < _PART else os.O_DIRECT
        try:
            read = os.open(path, os.O_RDONLY | flags)
        except OSError:  # tmpfs
            read = os.open(path, os.O_RDONLY)
        written = os.open(to / path.name, os.O_WRONLY | os.O_CREAT | flags, 0o644)
        os.posix_fallocate(written, 0, max(path.stat().st_size, 1))
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(partial(copy, read, written), range(0, path.stat().st_size, _PART)))
        os.ftruncate(written, path.stat().st_size)
        os.fdatasync(written)
        os.close(read)
        os.close(written)


def steps_per_s(work: Callable[[], None] | None) -> float:
    """Of a loop with some Python and some arithmetic, while `work` runs; alone for some seconds."""
    weight, x = torch.randn(96, 96), torch.randn(96, 96)
    thread = None if work is None else threading.Thread(target=work)
    if thread is not None:
        thread.start()
    begin_s, num_steps = time.perf_counter(), 0
    while thread.is_alive() if thread is not None else time.perf_counter() - begin_s < _ALONE_S:
        for _ in range(20):
            x = torch.nn.functional.layer_norm(x @ weight, (96,))
        num_steps += 1
    return num_steps / (time.perf_counter() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--near", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--bandwidth", type=parse_speed, default="100MB/s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    near = Path(tempfile.mkdtemp(dir=options.near))
    try:
        with loaderkit.CheckpointManager(near) as checkpoints:
            checkpoints.save(1, {"x": torch.randn(int(options.gigabytes * 2.5e8))})
        source = near / "step-0000000001"
        numbers = iter(range(10**6))
        contestants: dict[str, Callable[[], None] | None] = {
            "alone": None,
            "upload": lambda: upload(source, folder / str(next(numbers)), None),
            "bounded": lambda: upload(source, folder / str(next(numbers)), options.bandwidth),
            "bare": lambda: bare(source, folder / str(next(numbers))),
        }
        ratios: dict[str, list[float]] = {name: [] for name in contestants if name != "alone"}
        cpu_s: dict[str, list[float]] = {"upload": [], "bare": []}
        for number in range(options.rounds + 1):
            found: dict[str, float] = {}
            for name in random.Random(number).sample([*contestants], len(contestants)):
                found[name] = steps_per_s(contestants[name])
                shutil.rmtree(folder)
                folder.mkdir()
            for name, values in cpu_s.items():
                begin_s = time.process_time()
                work = contestants[name]
                assert work is not None
                work()
                if number:
                    values.append((time.process_time() - begin_s) / options.gigabytes)
                shutil.rmtree(folder)
                folder.mkdir()
            if number:  # the first one warms up
                for name, shares in ratios.items():
                    shares.append(found[name] / found["alone"])
                print(f"round {number}: " + ", ".join(f"{name} {rate:.0f} steps/s" for name, rate in found.items()))
        result: dict[str, Any] = {
            "gigabytes": options.gigabytes,
            "steps_beside": {name: statistics.median(shares) for name, shares in ratios.items()},
            "upload_over_bare": statistics.median(
                one / other for one, other in zip(ratios["upload"], ratios["bare"], strict=True)
            ),
            "cpu_s_per_gb": {name: statistics.median(values) for name, values in cpu_s.items()},
            "rounds": {"ratios": ratios, "cpu_s_per_gb": cpu_s},
        }
        print({name: value for name, value in result.items() if name != "rounds"})
        record(options.out, "uploads", **result)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(near)


if __name__ == "__main__":
    main()
