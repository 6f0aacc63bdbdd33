"""Runs a program as it is, in one of torchrun's ranks: `noticed.py RANK CALL PROGRAM ARGUMENT...`

Rank RANK gets SIGTERM when it has made CALL calls, of functions in Python and in C, since its state was restored; so a number
stands for a moment: in a computation, in a collective, while a save is staged or awaited. Each rank writes a digest of each of
its batches to batches-<rank>.txt, and at the end the number of its calls to calls-<rank>.txt.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

from buckets import digest

import loaderkit


class Counter:
    """Counts calls; at number `last` the process gets a signal."""

    def __init__(self, last: int) -> None:
        self.num, self._last = 0, last

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.num += event in ("call", "c_call")
        if self.num == self._last:
            self.num += 1
            os.kill(os.getpid(), signal.SIGTERM)


def main(victim: int, last: int, program: str, *arguments: str) -> None:
    rank = int(os.environ["RANK"])
    counter = Counter(last if rank == victim else -1)
    restore, iterate = loaderkit.CheckpointManager.restore, loaderkit.Loader.__iter__

    def restored(self: Any, *args: Any, **more: Any) -> int | None:
        step = restore(self, *args, **more)
        sys.setprofile(counter)
        return step

    def batches(self: loaderkit.Loader) -> Iterator[dict[str, Any]]:
        with open(f"batches-{rank}.txt", "a") as file:
            for batch in iterate(self):
                print(digest(batch), file=file, flush=True)
                yield batch

    vars_: Any = loaderkit
    vars_.CheckpointManager.restore, vars_.Loader.__iter__ = restored, batches
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
    sys.setprofile(None)
    with open(f"calls-{rank}.txt", "w") as file:
        file.write(str(counter.num))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
