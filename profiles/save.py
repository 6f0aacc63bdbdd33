"""Saving a checkpoint of CPU tensors, beside other savers, bare parallel writes, and bare copies.

    python -m profiles.save [flush pause loop s3] --gigabytes 2 --rounds 5 [--tiny] [--folder /data] [--out profiles/results]

Contestants take turns within a round, the order changed from round to round; what is compared is the ratio within a round. All
write as many bytes to new files and make them durable; what is removed afterwards, and a sync, are not timed.

flush  of a copy that `StreamWriter.stage` has made, as `dcp.async_save` writes it, and of tensors in use; `dcp.save` and others
       (torch_checkpointing where it is installed); and bare writes by as many threads, then fdatasync
pause  until `dcp.async_save` returns, from the second save on, beside copying the same tensors to memory that is kept; and the
       pages that are new to the process meanwhile
loop   steps a second of a training while a manager flushes, by threads and by a process, beside a bare write of as many bytes
       by as many threads
s3     to a bucket, beside s3torchconnector's writer and parts that boto3 sends in parallel
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
from functools import partial
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
from profiles.save_others import Loop, for_seconds, in_a_thread, in_turns, measure_s3, other_savers, process_save

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
    runs |= {name: partial(saver, state) for name, saver in other_savers().items()}
    checked: set[str] = set()

    def measured(name: str) -> float:
        path = folder / "saved"
        begin_s = time.perf_counter()
        runs[name](path)
        took_s = time.perf_counter() - begin_s
        if name.startswith("loaderkit") and name not in checked:
            checked.add(name)
            restored = loaderkit.restore(path, verify=True)
            assert all(torch.equal(restored[key], tensor) for key, tensor in state.items())
            del restored
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        return took_s

    seconds = in_turns({name: partial(measured, name) for name in runs}, rounds)
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
        "dcp.async_save, process": lambda: process_save(state, folder / "d"),
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


def measure_loop(state: State, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Steps a second, alone and beside each contestant's writing of the state."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    plain, aligned, loop = parts_in(state), aligned_parts(state), Loop()
    torch.set_num_threads(1)
    managers = {flush: loaderkit.CheckpointManager(folder / flush, flush=flush) for flush in ("thread", "process")}

    def flushed(flush: str) -> Callable[[], bool]:
        saving = managers[flush].save(1, {"model": state}, force=True)
        assert saving is not None
        return lambda: saving.is_done

    begins: dict[str, Callable[[], Callable[[], bool]]] = {
        "alone": lambda: for_seconds(2.0),
        "loaderkit, thread": lambda: flushed("thread"),
        "loaderkit, process": lambda: flushed("process"),
        "bare pwrite": lambda: in_a_thread(lambda: bare(folder / "a", plain, num_bytes, 0)),
        "bare O_DIRECT": lambda: in_a_thread(lambda: bare(folder / "a", aligned, num_bytes, os.O_DIRECT)),
    }

    def measured(name: str) -> float:
        speed = loop.steps_a_second(begins[name])
        for manager in managers.values():
            manager.wait_until_finished()
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        return speed

    speeds = in_turns({name: partial(measured, name) for name in begins}, rounds, warm_up=2)
    for manager in managers.values():
        manager.close()
    return speeds


def tell_loop(speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print and return a row for each contestant: steps a second, and how many times those beside a bare write, in the median
    over the rounds."""
    rows = []
    for name, found in speeds.items():
        ratios = {
            other: statistics.median(one / two for one, two in zip(found, speeds[other], strict=True))
            for other in ("alone", "bare pwrite", "bare O_DIRECT")
        }
        rows.append({"name": name, "steps_a_second": found, "times": ratios})
        said = ", ".join(f"{ratio:.2f} x {other}" for other, ratio in ratios.items())
        print(f"  {name:32} {statistics.median(found):7.1f} steps/s  {said}")
    return rows


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
    parser = state_parser(__doc__, gigabytes=2)
    parser.add_argument("works", nargs="*", default=["flush", "pause", "loop"], help="flush, pause, loop, s3")
    args = parser.parse_args()
    torch.set_num_threads(2)
    state = make_state(args.gigabytes, args.tiny)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for work in args.works:
            (folder := Path(name, work)).mkdir()
            if work == "flush":
                found[work] = tell(work, measure_flush(state, folder, args.rounds), "loaderkit", num_bytes)
            elif work == "pause":
                seconds, faults = measure_pause(state, folder, args.rounds)
                found[work] = tell(work, seconds, "copies to memory that is kept", num_bytes)
                found["page_faults"] = {name: statistics.median(each) for name, each in faults.items()}
                print("faults on pages:", found["page_faults"])
            elif work == "loop":
                found[work] = tell_loop(measure_loop(state, folder, args.rounds))
            elif work == "s3":
                seconds = measure_s3(state, folder, args.rounds, _WORKERS)
                found[work] = tell(work, seconds, "loaderkit", num_bytes)
            else:
                parser.error(f"{work!r}: expected flush, pause, loop or s3")
    found["load_after"] = os.getloadavg()[0]
    kind = "-".join(["save", *(["tiny"] if args.tiny else []), *([] if "flush" in args.works else args.works)])
    record(args.out, kind, num_bytes=num_bytes, workers=_WORKERS, **found)


if __name__ == "__main__":
    main()
