"""What a training loop loses while a checkpoint is written: by a thread, by a process, and by bare writes from threads.

    python -m profiles.flush --megabytes 1000 --tensors 400 --rounds 5 [--folder /data] [--out profiles/results]

In each round the loop runs alone, and then beside a contestant, for each of them in an order that changes: its speed is a ratio
to that. `pause`: how long `save` takes to return, from the second save on, in times of copying the tensors to memory that is
kept.

small ops   a step of a small network: torch's operations are called from Python, a microsecond or two each
python      a step computed in Python alone, which never gives up the GIL
matmul      a step of one large product, without the GIL
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import loaderkit
from profiles.record import record
from profiles.save import State, aligned_parts, bare

Step = Callable[[], Any]
_ALONE_S = 0.5
warnings.filterwarnings("ignore")


def small_ops() -> Step:
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(4, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    return step


def python() -> Step:
    def step() -> None:
        total = 0
        for number in range(20_000):
            total += number & 7

    return step


def matmul() -> Step:
    one = torch.randn(512, 512)
    return lambda: one @ one


def speed(step: Step, is_over: Callable[[], bool]) -> tuple[float, float]:
    """(steps/s until it is over, seconds until then)."""
    num_steps, begin_s = 0, time.perf_counter()
    while not is_over():
        step()
        num_steps += 1
    took_s = time.perf_counter() - begin_s
    return num_steps / took_s, took_s


def alone(step: Step) -> float:
    end_s = time.perf_counter() + _ALONE_S
    return speed(step, lambda: time.perf_counter() > end_s)[0]


class Flushes:
    """The contestants: each begins to write the state, and returns a question whether it is over."""

    def __init__(self, state: State, folder: Path, held: ExitStack) -> None:
        self.state, self.folder, self.number = state, folder, 0
        self.parts = aligned_parts(state)
        self.managers = {
            flush: held.enter_context(loaderkit.CheckpointManager(folder / flush, flush=flush))
            for flush in ("thread", "process")
        }

    def begin(self, name: str) -> tuple[Callable[[], bool], float]:
        """(is it over, the seconds that `save` took)."""
        self.number += 1
        begin_s = time.perf_counter()
        if name == "bare":
            num_bytes = sum(len(part) for _, part in self.parts)
            path = self.folder / "bare"
            thread = threading.Thread(target=lambda: bare(path, self.parts, num_bytes, 0o40000))  # O_DIRECT
            thread.start()
            return lambda: not thread.is_alive(), 0.0
        saving = self.managers[name].save(self.number, {"state": self.state})
        assert saving is not None
        return lambda: saving.is_done, time.perf_counter() - begin_s

    def clear(self) -> None:
        for path in [*self.folder.glob("*/*"), self.folder / "bare"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.megabytes * 250_000 // args.tensors
    state = {f"w{number}": torch.randn(size) for number in range(args.tensors)}
    kept = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    names = ("thread", "process", "bare")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name, ExitStack() as held:
        flushes = Flushes(state, Path(name), held)
        for make in (small_ops, python, matmul):
            step = make()
            found: dict[str, dict[str, list[float]]] = {one: {"steps": [], "lost_s": [], "pause": []} for one in names}
            for number in range(args.rounds + 1):
                for one in random.Random(number).sample(names, len(names)):
                    begin_s = time.perf_counter()
                    for key, tensor in state.items():
                        kept[key].copy_(tensor)
                    copied_s = time.perf_counter() - begin_s
                    before = alone(step)
                    is_over, pause_s = flushes.begin(one)
                    beside, took_s = speed(step, is_over)
                    flushes.clear()
                    if number:  # the first time memory is new, and the process starts
                        found[one]["steps"].append(beside / before)
                        found[one]["lost_s"].append(took_s * (1 - beside / before))
                        found[one]["pause"].append(pause_s / copied_s)
            for one, taken in found.items():
                medians = {kind: statistics.median(values) for kind, values in taken.items()}
                said = ", ".join(f"{kind} {value:.3f}" for kind, value in medians.items())
                print(f"{make.__name__:10} {one:8} {said}", flush=True)
                rows.append({"loop": make.__name__, "flush": one, **taken, "medians": medians})
    record(args.out, "flush", num_bytes=args.megabytes * 10**6, num_tensors=args.tensors, rows=rows)


if __name__ == "__main__":
    main()
