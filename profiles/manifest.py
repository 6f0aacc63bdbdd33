"""What the manifest costs a save: hashing every block while it is written, and making and writing the manifest.

    python -m profiles.manifest --gigabytes 1 --rounds 5 [--folder /data] [--out profiles/results]

A state in 400 tensors and one in 4 are copied once, and the copy is written by `StreamWriter`, as it is and without the hashes;
what is written without them is no whole checkpoint. They take turns within a round; what is compared is the difference within a
round, in seconds and in CPU seconds of all threads, over those of the save as it is; both make the checksums (CRC-32) that
torch's format has with or without a manifest. Beside: seconds of the threads in hashing, and seconds and CPU seconds of the
commit, which makes the manifest and writes it with the rest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from loaderkit.checkpoint import StreamWriter
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.save import dcp_writer, engine
from profiles.record import record
from profiles.save_others import in_turns

_FILL_PART: Callable[..., float] = vars(engine)["_fill_part"]
warnings.filterwarnings("ignore")


def not_hashed(part: Any, memory: Any, rows: Any, blocks: Any) -> float:
    """In the place of the engine's function that fills a part: without hashes."""
    return _FILL_PART(part, memory, rows, np.zeros_like(blocks))


@contextmanager
def replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    """While the block runs, a module has another function."""
    before = vars(module)[name]
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def measure(num_tensors: int, num_bytes: int, folder: Path, rounds: int) -> dict[str, Any]:
    """By contestant, what each of its runs took."""
    state = {f"w{number}": torch.randn(num_bytes // 4 // num_tensors) for number in range(num_tensors)}
    writer = StreamWriter(folder)
    copied = writer.stage(state)
    taken: dict[str, list[dict[str, float]]] = {"as it is": [], "without hashes": []}
    commit = vars(dcp_writer)["commit"]

    def run(name: str) -> float:
        path, of_commit = folder / "saved", [0.0, 0.0]
        fill_part = _FILL_PART if name == "as it is" else not_hashed

        def timed(*args: Any, **more: Any) -> None:
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            commit(*args, **more)
            of_commit[:] = [time.perf_counter() - begin_s, time.process_time() - begin_cpu_s]

        with replaced(engine, "_fill_part", fill_part), replaced(dcp_writer, "commit", timed):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            save(copied, checkpoint_id=path, storage_writer=writer, no_dist=True)
            took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        taken[name].append(
            {
                "seconds": took_s,
                "cpu_s": cpu_s,
                "hashing_s": sum(file["hashing_s"] for file in (writer.stats or {})["ranks"][0].values()),
                "commit_s": of_commit[0],
                "commit_cpu_s": of_commit[1],
                "manifest_bytes": (path / NAME).stat().st_size,
            }
        )
        shutil.rmtree(path)
        os.sync()
        return took_s

    in_turns({name: partial(run, name) for name in taken}, rounds)
    return {name: runs[1:] for name, runs in taken.items()}


def shares(taken: dict[str, list[dict[str, float]]], kind: str) -> dict[str, float]:
    """By contestant: how much less it takes than the save as it is, as a share of that, in the median over the rounds."""
    whole = [run[kind] for run in taken["as it is"]]
    return {
        name: statistics.median((one - run[kind]) / one for one, run in zip(whole, runs, strict=True))
        for name, runs in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes, rows, load_before = int(args.gigabytes * 1e9), [], os.getloadavg()[0]
    for num_tensors in (400, 4):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            taken = measure(num_tensors, num_bytes, Path(name), args.rounds)
        saved = {kind: shares(taken, kind) for kind in ("seconds", "cpu_s")}
        rows.append({"num_tensors": num_tensors, "runs": taken, "saved": saved})
        print(f"{num_tensors} tensors")
        for one, runs in taken.items():
            medians = {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
            print(f"  {one:14}", ", ".join(f"{kind} {value:.4g}" for kind, value in medians.items()))
            print(
                f"  {'':14} less by {saved['seconds'][one]:.1%} of the seconds, {saved['cpu_s'][one]:.1%} of the CPU's"
            )
    record(args.out, "manifest", num_bytes=num_bytes, rows=rows, load_before=load_before, load_after=os.getloadavg()[0])


if __name__ == "__main__":
    main()
