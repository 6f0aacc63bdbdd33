"""Loads where user's code forks, one case after another, and says what came of each.

    python forking.py LOG < CASES

CASES is a JSON list of `Case`s as dicts. What user's code and its children do is noted in LOG, one line each: case, process,
what.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from executors import EXECUTORS

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import StageError

NUM_SAMPLES, BATCH, FORKING = 24, 8, 13
PLACES = ("call", "limited", "batch", "item", "items", "connector", "retried", "records")
POLICIES = ("raise", "skip", "replace")
CODES = {"exit 0": 0, "exit 3": 3, "exit text": 1, "return": 0, "raise": 1, "os._exit": 5}
"""How a child ends, and the exit code that its parent is to see."""
WAYS = ("fork", "multiprocessing", "exec", "pool", "live on")


@dataclass(frozen=True)
class Case:
    """`way`: what is forked, and how; `end`: how that ends, for the ways that leave it open."""

    number: int
    executor: str
    policy: str
    place: str
    way: str
    end: str = "return"

    @property
    def code(self) -> int:
        """The exit code that the parent sees."""
        return CODES[self.end] if self.way in ("fork", "multiprocessing") else 0


@dataclass(frozen=True)
class Notes:
    """Writes lines to a file that many processes write to."""

    path: str
    number: int

    def __call__(self, what: object) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{self.number} {os.getpid()} {what}\n".encode())


def end(how: str, note: Notes) -> None:
    """What a child does."""
    note("child")
    if how == "exit 0":
        sys.exit()
    if how == "exit 3":
        sys.exit(3)
    if how == "exit text":
        sys.exit("the child's last words")
    if how == "raise":
        raise ValueError("the child's error")
    if how == "os._exit":
        os._exit(5)


@dataclass(frozen=True)
class Forker:
    """Forks once."""

    case: Case
    note: Notes

    def __call__(self, index: int) -> bool:
        """Called with the number of every sample; whether this is the child. Raises RuntimeError in its parent if it fails."""
        self.note(index)
        if index == FORKING:
            code = self._code()
            if code is not None and code != self.case.code:
                self.note(f"code {code}")
            if code:
                raise RuntimeError("the parent's error")
            return code is None
        return False

    def _code(self) -> int | None:
        """The child's exit code; None in the child."""
        way = self.case.way
        forking = multiprocessing.get_context("fork")
        if way == "multiprocessing":
            process = forking.Process(target=end, args=(self.case.end, self.note))
            process.start()
            process.join()
            return process.exitcode
        if way == "pool":
            with forking.Pool(2) as pool:
                return int(pool.map(abs, [0, 0])[0])
        if way == "exec":
            with subprocess.Popen(["sleep", "3600"]) as program:
                program.terminate()
            if program.returncode != -signal.SIGTERM:
                return program.returncode or 1
        pid = os.fork()
        if pid:
            return 0 if way == "live on" else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if way == "live on":
            self.note("child")
            _live_on()
        if way == "exec":
            self.note("child")
            os.execlp("true", "true")
        end(self.case.end, self.note)
        return None


def _live_on() -> NoReturn:
    while True:
        signal.pause()


class Items:
    """Item i is i, with a type, so that only the first is asked for to see what a batch holds; `forker` is told of each."""

    def __init__(self, forker: Forker | None) -> None:
        self.forker = forker

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.int64]:
        if self.forker is not None:
            self.forker(index)
        return {"x": np.int64(index)}


class ManyItems(Items):
    def __getitem__(self, index: int) -> dict[str, np.int64]:
        return {"x": np.int64(index)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.int64]]:
        assert self.forker is not None
        any(map(self.forker, indices))  # the child goes no further
        return [{"x": np.int64(index)} for index in indices]


class Objects(MemoryConnector):
    """Object i is the byte i, or byte i of the only object is; `forker` is told of each that is read."""

    def __init__(self, forker: Forker) -> None:
        numbers = bytes(range(NUM_SAMPLES))
        is_one = forker.case.place == "records"
        super().__init__({"all.bin": numbers} if is_one else {f"{n:02}.bin": bytes([n]) for n in numbers})
        self.forker = forker

    def __reduce__(self) -> Any:
        return Objects, (self.forker,)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        any(map(self.forker, bytes(buffer)))


def call(forker: Forker, sample: dict[str, Any]) -> None:
    forker(int(sample["x"]))


def call_on_batch(forker: Forker, batch: dict[str, Any]) -> None:
    any(map(forker, batch["x"].tolist()))


def make(case: Case, forker: Forker) -> Pipeline:
    """The pipeline whose place of that name forks."""
    place = case.place
    if place in ("connector", "retried", "records"):
        if place == "records":
            source = Pipeline.array("memory://all.bin", dtype="uint8", shape=[])
        else:
            source = Pipeline.files("memory://", include="*.bin")
        return source.shuffle("none").epochs(1).read().batch(BATCH)
    data = {"item": Items, "items": ManyItems}.get(place, Items)(forker if place in ("item", "items") else None)
    read = Pipeline.dataset(data).shuffle("none").epochs(1).read()
    if place == "batch":
        return read.batch(BATCH).call(partial(call_on_batch, forker))
    limit: dict[str, Any] = {"timeout": 3600} if place == "limited" else {}
    return (read.call(partial(call, forker), **limit) if place in ("call", "limited") else read).batch(BATCH)


def run(case: Case, path: str) -> dict[str, Any]:
    """The numbers of the samples of each batch, and the error."""
    forker = Forker(case, Notes(path, case.number))
    overrides = {**EXECUTORS[case.executor], "errors.on_bad_sample": case.policy}
    if case.place == "retried":
        overrides["source.retry.timeout"] = 3600
    batches: list[list[int]] = []
    error: str | None = None
    of: str | None = None
    with loaderkit.build(make(case, forker), overrides=overrides, connectors={"memory": Objects(forker)}) as loader:
        try:
            for batch in loader:
                numbers = next(batch[name] for name in ("x", "0", "data", "bin") if name in batch)
                batches.append([n[0] if isinstance(n, bytes) else int(n) for n in numbers])
        except StageError as raised:
            error, of = str(raised), raised.key
        pids = loader.stats().tuning.pids or [os.getpid()]
    return {**asdict(case), "batches": batches, "error": error, "of": of, "pids": pids}


def main() -> None:
    atexit.register(Notes(sys.argv[1], -1), "atexit")
    for fields in json.load(sys.stdin):
        print(json.dumps(run(Case(**fields), sys.argv[1])), flush=True)


if __name__ == "__main__":
    import forking  # the process that loads finds nothing in __main__

    forking.main()
