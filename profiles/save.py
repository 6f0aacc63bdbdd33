"""Saving a checkpoint of CPU tensors, beside torch's own writer, bare parallel writes, and bare copies.

    python -m profiles.save --gigabytes 2 --rounds 5 [--tiny] [--folder /data] [--out profiles/results]

Contestants take turns within a round, the order changed from round to round; what is compared is the ratio within a round. All
write as many bytes to new files and make them durable; what is removed afterwards, and a sync, are not timed.

flush  of a copy that `StreamWriter.stage` has made, as `dcp.async_save` writes it, and of tensors in use; `dcp.save`; and bare
       writes by as many threads, then fdatasync
pause  until `dcp.async_save` returns, from the second save on, beside copying the same tensors to memory that is kept; and the
       pages that are new to the process meanwhile
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import loaderkit
from loaderkit.checkpoint import StreamWriter
from loaderkit.checkpoint.transfer.layout import bytes_of
from profiles.record import record
from profiles.restore import make_state, state_parser

State = dict[str, torch.Tensor]
_PART = 8 * 2**20
_WORKERS = 4
warnings.filterwarnings("ignore")


def bare(path: Path, parts: list[tuple[int, memoryview]], num_bytes: int, flags: int) -> None:
    """Write parts from some threads, allocated first as ours are, and make them durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    os.posix_fallocate(descriptor, 0, num_bytes)
    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(lambda part: os.pwrite(descriptor, part[1], part[0]), parts))
    os.fdatasync(descriptor)
    os.close(descriptor)


def parts_in(state: State) -> list[tuple[int, memoryview]]:
    """The tensors' memory in parts, and where in a file each is to be."""
    found, start = [], 0
    for memory in (bytes_of(tensor) for tensor in state.values()):
        for lo in range(0, len(memory), _PART):
            found.append((start, memory[lo : lo + _PART]))
            start += len(found[-1][1])
    return found


def aligned_parts(state: State) -> list[tuple[int, memoryview]]:
    """As many bytes in memory that begins at a page."""
    num_bytes = -(-sum(tensor.nbytes for tensor in state.values()) // 4096) * 4096
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = np.resize(
        np.concatenate([np.frombuffer(bytes_of(tensor), np.uint8) for tensor in state.values()]), num_bytes
    )
    return [(lo, memory[lo : lo + _PART].data) for lo in range(0, num_bytes, _PART)]


def measure_flush(state: State, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every round but the first."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    plain, aligned = parts_in(state), aligned_parts(state)
    writer = StreamWriter(folder)
    copied = writer.stage(state)
    runs: dict[str, Callable[[Path], Any]] = {
        "loaderkit": lambda path: save(copied, checkpoint_id=path, storage_writer=writer, no_dist=True),
        "loaderkit, of tensors in use": lambda path: save(
            state, checkpoint_id=path, storage_writer=writer, no_dist=True
        ),
        "dcp.save": lambda path: save(state, checkpoint_id=path, no_dist=True),
        "dcp.save, 4 threads": lambda path: save(
            state, storage_writer=FileSystemWriter(path, thread_count=4), no_dist=True
        ),
        "bare pwrite and fdatasync": lambda path: bare(path, plain, num_bytes, 0),
        "bare O_DIRECT and fdatasync": lambda path: bare(path, aligned, num_bytes, os.O_DIRECT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            path = folder / "saved"
            begin_s = time.perf_counter()
            runs[name](path)
            took_s = time.perf_counter() - begin_s
            if number:
                seconds[name].append(took_s)
            elif name.startswith("loaderkit"):
                restored = loaderkit.restore(path, verify=True)
                assert all(torch.equal(restored[key], tensor) for key, tensor in state.items())
                del restored
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
    print("of loaderkit's last save:", writer.stats)
    return seconds


def measure_pause(state: State, folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of every contestant in every round but the first two, and the faults on new pages."""
    kept = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    writer, stager = StreamWriter(folder), DefaultStager(StagingOptions(False, False, False, False))

    def copy() -> None:
        for name, tensor in state.items():
            kept[name].copy_(tensor)

    runs: dict[str, Callable[[], Any]] = {
        "copies to memory that is kept": copy,
        "loaderkit": lambda: async_save(state, checkpoint_id=folder / "a", storage_writer=writer, no_dist=True),
        "loaderkit, only the copy": lambda: writer.stage(state),
        "dcp.async_save": lambda: async_save(state, checkpoint_id=folder / "b", no_dist=True),
        "dcp.async_save, kept": lambda: async_save(
            state, checkpoint_id=folder / "c", async_stager=stager, no_dist=True
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    faults: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin_s = time.perf_counter()
            result = runs[name]()
            took_s = time.perf_counter() - begin_s
            faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            if hasattr(result, "result"):
                result.result()
            del result
            if number > 1:
                seconds[name].append(took_s)
                faults[name].append(faulted)
            for path in folder.iterdir():
                shutil.rmtree(path)
            os.sync()
    return seconds, faults


def tell(title: str, seconds: dict[str, list[float]], against: str, num_bytes: int) -> list[dict[str, Any]]:
    """Print and return a row for each contestant: how many times as long as `against`, in the median over the rounds."""
    print(title)
    rows = []
    for name, taken in sorted(seconds.items(), key=lambda item: statistics.median(item[1])):
        ratio = statistics.median(one / other for one, other in zip(taken, seconds[against], strict=True))
        rows.append({"name": name, "seconds": taken, f"times {against}": ratio})
        speed = num_bytes / statistics.median(taken) / 1e9
        print(f"  {name:32} {statistics.median(taken):7.3f} s  {speed:6.2f} GB/s  {ratio:6.2f} x {against}")
    return rows


def main() -> None:
    args = state_parser(__doc__, gigabytes=2).parse_args()
    torch.set_num_threads(2)
    state = make_state(args.gigabytes, args.tiny)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        flush = tell("flush", measure_flush(state, Path(name), args.rounds), "loaderkit", num_bytes)
        seconds, faults = measure_pause(state, Path(name), args.rounds)
    pause = tell("pause", seconds, "copies to memory that is kept", num_bytes)
    medians = {name: statistics.median(found) for name, found in faults.items()}
    print("faults on pages:", medians)
    kind = "save-tiny" if args.tiny else "save"
    record(args.out, kind, num_bytes=num_bytes, workers=_WORKERS, flush=flush, pause=pause, page_faults=medians)


if __name__ == "__main__":
    main()
