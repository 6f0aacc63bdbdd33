"""Interrupts a loader's life at every place of the package where the interpreter looks for Ctrl-C, one life each, and says
where anything was left of it.

    python everywhere.py LIFE PART NUM_PARTS

LIFE is an executor, `death` (of a process that loads: the places where another one takes its), `records` (of which the loop
makes batches itself), `pictures` (made inline from JPEGs, with a cache), `volumes` (made inline, of unequal shape), or
`restore` (of a checkpoint).

The interpreter looks after calls, at the beginning of functions, and where loops begin anew. So SIGINT is noted right before
one of those is executed, by a trace function that is none of Python's: one of those would find the signal itself.
"""

from __future__ import annotations

import _thread
import ctypes
import dis
import faulthandler
import gc
import io
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

from executors import EXECUTORS
from leftovers import resources
from numbers_dataset import numbers
from waiting import wait_for

import loaderkit
from loaderkit._internal.torch_threads import ONE_AT_A_TIME

_LOOKING = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")  # and what begins so
_FILES = (str(Path(loaderkit.__file__).parent), contextmanager.__code__.co_filename)
_PATIENCE_S = 60.0
_SETTLED_S = 10.0
_LONG_S = 5.0  # a life takes a second or so
_NUM_TRIES = 3  # where it took longer: a machine may be busy

_interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt  # called as trace functions are, with what it does not look at
_interrupt.argtypes = [ctypes.py_object] * 3
_interrupt.restype = None


def all_resources() -> tuple[int, ...]:
    """Those of `resources`, what runs of any thread, and how many threads torch computes with in this one."""
    return *resources(), _thread._count(), torch.get_num_threads()


class Place(NamedTuple):
    code: CodeType
    offset: int  # of the instruction before

    def __str__(self) -> str:
        lines = {offset: line for begin, end, line in self.code.co_lines() for offset in range(begin, end, 2)}
        return f"{self.code.co_qualname}, {self.code.co_filename}:{lines[self.offset]}"


@cache
def _offsets(code: CodeType) -> frozenset[int]:
    """Of the instructions right before those that look for signals."""
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"]
    return frozenset(before.offset for before, after in pairwise(found) if after.opname.startswith(_LOOKING))


class Finder:
    """A trace function that notes the places come by."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _offsets(frame.f_code):
            self.places[Place(frame.f_code, frame.f_lasti)] = None
        return self


class Interrupter:
    """A trace function that interrupts at the first coming by a place."""

    def __init__(self, place: Place) -> None:
        self._place: Place | None = place

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._place is None or frame.f_code is not self._place.code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == self._place.offset:
            self._place = None
            return _interrupt
        return self


def load_pictures(folder: Path) -> None:
    cache = {"dir": tempfile.mkdtemp(dir=folder), "size": "100MB"}
    source = loaderkit.Pipeline.tar(str(folder / "pictures.tar"), cache=cache)
    pipeline = source.shuffle("global").read().decode().resize((16, 16)).batch(4)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        for number, _ in enumerate(loader):
            if number == 1:
                break


def load_volumes(folder: Path) -> None:
    pipeline = loaderkit.Pipeline.files(str(folder / "volumes")).read().decode().batch(2, ragged={"npy": "list"})
    load(pipeline.epochs(2), {"prefetch.executor": "inline"})


def restore(folder: Path) -> None:
    into = {f"layer.{number}": torch.empty(64, 64) for number in range(4)}
    loaderkit.restore(folder / "model.safetensors", into)


def fill(folder: Path) -> None:
    """Write what the lives read."""
    colours = np.random.default_rng(0).integers(0, 256, (8, 3))
    with tarfile.open(folder / "pictures.tar", "w") as archive:
        for number, colour in enumerate(colours):
            file = io.BytesIO()
            Image.new("RGB", (40, 30), tuple(colour)).save(file, "JPEG")
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)
    (folder / "volumes").mkdir()
    for number in range(6):
        np.save(folder / "volumes" / f"{number}.npy", np.zeros(600_000 + number, np.uint8))
    np.save(folder / "records.npy", np.arange(8000).reshape(2000, 4))
    state = {f"layer.{number}": torch.full((64, 64), float(number)) for number in range(4)}
    save_file(state, folder / "model.safetensors")


def load_records(folder: Path) -> None:
    pipeline = loaderkit.Pipeline.array(str(folder / "records.npy")).shuffle(seed=0).read().batch(16)
    load(pipeline, {"prefetch.executor": "thread", "prefetch.concurrency": 1})


def load(pipeline: loaderkit.Pipeline, overrides: dict[str, Any]) -> None:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        for number, _ in enumerate(loader):
            if number == 30:  # the loop makes its batches itself by then, if it may
                loader.set_epoch(3)
                break
        for number, _ in enumerate(loader):
            if number == 3:
                break


def load_past_a_death() -> None:
    with loaderkit.build(numbers(400), overrides=EXECUTORS["process"]) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                for pid in loader.stats().tuning.pids or ():
                    os.kill(pid, signal.SIGKILL)
            if number == 10:
                break


def live_with(trace: Any, live: Callable[[], None]) -> bool:
    """One life; whether it was interrupted, which it is once at most."""
    was_interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        sys.settrace(None)  # or it would be interrupted again at the next instruction
        if not was_interrupted:
            was_interrupted = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    with suppress(KeyboardInterrupt):
        try:
            sys._getframe().f_trace_opcodes = (
                True  # Python 3.12 has opcodes traced only if a frame asks for it beforehand
            )
            sys.settrace(trace)
            live()
        finally:
            sys.settrace(None)
    return was_interrupted


def timed(live: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and how long it takes in s."""
    begin_s = time.monotonic()
    return live(), time.monotonic() - begin_s


def interrupt(place: Place, live: Callable[[], None]) -> tuple[bool, str]:
    """One life, interrupted at a place: whether it was, and what is wrong with how it ended."""
    for _ in range(_NUM_TRIES):
        faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
        was_interrupted, took_s = timed(partial(live_with, Interrupter(place), live))
        if ONE_AT_A_TIME.locked():
            return was_interrupted, "a lock is held"
        usual_s = 0.0 if took_s < _LONG_S else timed(live)[1]
        if took_s < _LONG_S + 2 * usual_s:
            return was_interrupted, ""
        if usual_s < _LONG_S / 2:  # it was not for want of a CPU
            break
    return was_interrupted, f"it took {took_s:.1f} s"


def places_of(live: Callable[[], None]) -> set[Place]:
    finder = Finder()
    live_with(finder, live)
    return set(finder.places)


def main(live: Callable[[], None], part: int, num_parts: int, known: Callable[[], None] | None = None) -> None:
    """`known`: a life whose places are left out."""
    live()  # what is loaded once and for all
    places = sorted(places_of(live) - (set() if known is None else places_of(known)), key=str)[part::num_parts]
    gc.collect()
    gc.freeze()  # so that looking for garbage is quick
    before = all_resources()
    num_interrupted = num_left = 0
    for place in places:
        print(place, file=sys.stderr, flush=True)
        was_interrupted, complaint = interrupt(place, live)
        num_interrupted += was_interrupted
        if complaint:
            print(f"{place}: {complaint}", flush=True)
            num_left += 1
        with suppress(AssertionError):
            wait_for(lambda before=before: all_resources() == before, _SETTLED_S)  # type: ignore[misc]
        if all_resources() != before:
            print(f"{place}: {all_resources()} instead of {before}", flush=True)
            num_left += 1
            before = all_resources()
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(places)} places, interrupted at {num_interrupted}, something was left at {num_left}")
    sys.exit(num_left > 0 or num_interrupted < 0.9 * len(places) or not places)


with tempfile.TemporaryDirectory() as name:
    fill(Path(name))
    lives: dict[str, Callable[[], None]] = {
        "pictures": partial(load_pictures, Path(name)),
        "volumes": partial(load_volumes, Path(name)),
        "restore": partial(restore, Path(name)),
        "records": partial(load_records, Path(name)),
        "death": load_past_a_death,
        **{executor: partial(load, numbers(400), overrides) for executor, overrides in EXECUTORS.items()},
    }
    known = lives["process"] if sys.argv[1] == "death" else None
    main(lives[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), known)
