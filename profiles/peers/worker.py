"""One contestant at one work, as a process of its own: orders come as lines of JSON, answers go the same way.

    python -m profiles.peers.worker '{"module": ..., "work": ..., "look": ..., "settings": {}, "root": ...}'

    {"do": "open"}                                      build it; -> version
    {"do": "warm", "samples": n}                        let n samples pass
    {"do": "measure", "skip": k, "seconds": s, "least": m}   k batches pass, then at least s seconds and m batches count
    {"do": "first", "epoch": false}                     build it, up to the first batch or through a whole epoch, by the clock
    {"do": "calibrate", "seconds": s}                   iterations of the busy loop that take so long
    {"do": "memory", "batches": n}                      let n batches pass; -> memory above that of `import torch`
    {"do": "checks"}                                    what the batches looked like

An answer is {"ok": ...} or {"error": ...}. End of input ends the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from profiles.peers import processes
from profiles.peers.looks import LOOKS
from profiles.peers.places import Places

_STEPS = 4  # busy steps a batch


class Worker:
    """Holds the contestant between orders."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._base = (processes.resident_bytes("VmRSS"), processes.memory_bytes(os.getsid(0)))
        self._module = importlib.import_module(f"profiles.peers.contestants.{spec['module']}")
        self._look = LOOKS[spec["look"]]()
        self._iterations = 0
        self._contestant: Iterable[Any] = ()
        self._stream: Iterator[Any] = iter(())

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order says."""
        arguments = {key: value for key, value in order.items() if key != "do"}
        answer: dict[str, Any] = getattr(self, f"do_{order['do']}")(**arguments)
        return answer

    def do_open(self, iterations: int = 0) -> dict[str, Any]:
        """`iterations`: of the busy loop at every step; 0: no busy steps."""
        self._iterations = iterations
        self._build()
        return {"version": self._version()}

    def do_warm(self, samples: int) -> dict[str, Any]:
        count = 0
        while count < samples:
            count += self._look(self._next())
        return {"samples": count}

    def do_measure(self, skip: int, seconds: float, least: int) -> dict[str, Any]:
        session = os.getsid(0)
        for _ in range(skip):
            self._next_counted()
        cpu = processes.cpu_seconds(session)
        count = num_batches = 0
        begin = now = time.perf_counter()
        while num_batches < least or now - begin < seconds:
            count += self._next_counted()
            num_batches += 1
            now = time.perf_counter()
        cpu = processes.cpu_seconds(session) - cpu
        return {"samples": count, "seconds": now - begin, "cpu_seconds": cpu, "batches": num_batches}

    def do_first(self, epoch: bool) -> dict[str, Any]:
        begin = time.perf_counter()
        self._build()
        count = self._look(self._next())
        if epoch:
            for batch in self._stream_of_one_epoch():
                count += self._look(batch)
        seconds = time.perf_counter() - begin
        return {"samples": count, "seconds": seconds, "cpu_seconds": None, "version": self._version()}

    def do_calibrate(self, seconds: float) -> dict[str, Any]:
        """By the least of five, since a busy machine only ever makes it longer."""
        trial = 100_000
        _busy(trial)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            _busy(trial)
            times.append(time.perf_counter() - begin)
        return {"iterations": round(trial * seconds / min(times))}

    def do_memory(self, batches: int) -> dict[str, Any]:
        most = 0
        count = 0
        for number in range(batches):
            count += self._look(self._next())
            if number % 8 == 7:
                most = max(most, processes.memory_bytes(os.getsid(0)))
        details: Callable[[Any], dict[str, Any]] = getattr(self._module, "details", lambda contestant: {})
        return {
            "samples": count,
            "resident_bytes": processes.resident_bytes("VmHWM") - self._base[0],
            "all_processes_bytes": most - self._base[1],
            **details(self._contestant),
        }

    def do_checks(self) -> dict[str, Any]:
        return self._look.result()

    def _build(self) -> None:
        spec = self._spec
        self._contestant = self._module.WORKS[spec["work"]](Places(Path(spec["root"])), spec["settings"])

    def _next(self) -> Any:
        """The next batch; epoch follows epoch."""
        try:
            return next(self._stream)
        except StopIteration:
            self._stream = iter(self._contestant)
            return next(self._stream)

    def _stream_of_one_epoch(self) -> Iterator[Any]:
        """The rest of the epoch that is running."""
        return self._stream

    def _next_counted(self) -> int:
        """Samples of the next batch; with busy steps, those steps."""
        num_samples = self._look(self._next())
        if not self._iterations:
            return num_samples
        for _ in range(_STEPS):
            _busy(self._iterations)
        return _STEPS

    def _version(self) -> str:
        package = self._module.PACKAGE
        return f"{package} {importlib.metadata.version(package)}"


def _busy(iterations: int) -> int:
    """Plain Python, which holds the interpreter's lock as a training loop's own code does."""
    value = 1
    for number in range(iterations):
        value = (value * 31 + number) & 0xFFFF
    return value


def main() -> None:
    """Serve until the input ends."""
    processes.die_with_parent()
    # What libraries print to standard output must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with suppress(ImportError):
        import torch  # noqa: F401 - as in any training program, before everything else
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            worker = worker or Worker(json.loads(sys.argv[1]))
            answer: dict[str, Any] = {"ok": worker.obey(json.loads(line))}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # whatever a library would wait for


if __name__ == "__main__":
    main()
