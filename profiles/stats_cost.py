"""What `loader.stats()` costs: python -m profiles.stats_cost

In a running loader, from another thread than the loop's, for few and for many workers and stages. Prints the median of 300
calls, and the same of `to_dict()`, which is made of what `stats()` returned, with its verdict. CPU time is what it costs; the
rest is waiting for the GIL, which 64 workers ask for, too.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import loaderkit
from loaderkit import Pipeline
from profiles.bottlenecks import light

_NUM_CALLS = 300


class Waiting:
    """A data set whose items take a millisecond, so that the workers run all the time and leave the CPUs free."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(1e-3)
        return {"x": index}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall time of a call in us, in the median."""
    cpu_s, wall_s = [], []
    for _ in range(_NUM_CALLS):
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        call()
        cpu_s.append(time.thread_time() - cpu_begin)
        wall_s.append(time.perf_counter() - begin)
        time.sleep(1e-3)
    return 1e6 * statistics.median(cpu_s), 1e6 * statistics.median(wall_s)


def consume(batches: Iterator[Any], is_over: threading.Event) -> None:
    while not is_over.is_set():
        next(batches)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for workers, num_calls, apart in ((2, 1, False), (16, 6, False), (64, 6, False), (16, 6, True)):
        pipeline = Pipeline.dataset(Waiting()).read()
        for _ in range(num_calls):
            pipeline = pipeline.call(light, workers=workers if apart else "auto")
        with loaderkit.build(pipeline.batch(64), overrides={"prefetch.concurrency": workers}) as loader:
            batches = (batch for _ in range(10**6) for batch in loader)
            for _ in range(10):
                next(batches)
            is_over = threading.Event()
            consumer = threading.Thread(target=consume, args=[batches, is_over])
            consumer.start()
            one = loader.stats()
            found = {"stats()": timed(loader.stats), "to_dict()": timed(one.to_dict)}
            is_over.set()
            consumer.join()
        num_threads = one.tuning.concurrency
        for name, (cpu_us, wall_us) in found.items():
            print(
                f"{num_threads} workers, {len(one.stages)} stages: {name} {cpu_us:.0f} us of CPU, {wall_us:.0f} us in all"
            )


if __name__ == "__main__":
    main()
