"""Interrupts a loader's life at every place of the package where the interpreter looks for Ctrl-C, one life each, and says
where anything was left of it.

    python everywhere.py EXECUTOR PART NUM_PARTS

The interpreter looks after calls, at the beginning of functions, and where loops begin anew. So SIGINT is noted right before
one of those is executed, by a trace function that is none of Python's: one of those would find the signal itself.
"""

from __future__ import annotations

import ctypes
import dis
import faulthandler
import gc
import signal
import sys
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from leftovers import resources
from of_executors import EXECUTORS
from of_numbers import numbers, wait_for

import loaderkit

_LOOKING = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
_FILES = (str(Path(loaderkit.__file__).parent), contextmanager.__code__.co_filename)
_PATIENCE_S = 20.0

_interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt  # called as trace functions are, with what it does not look at
_interrupt.argtypes = [ctypes.py_object] * 3
_interrupt.restype = None


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
    return frozenset(before.offset for before, after in pairwise(found) if after.opname in _LOOKING)


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


def live(executor: str) -> None:
    with loaderkit.build(numbers(400), overrides=EXECUTORS[executor]) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                loader.set_epoch(3)
                break
        for number, _ in enumerate(loader):
            if number == 3:
                break


def live_with(trace: Any, executor: str) -> bool:
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
            sys.settrace(trace)
            live(executor)
        finally:
            sys.settrace(None)
    return was_interrupted


def main(executor: str, part: int, num_parts: int) -> None:
    live(executor)  # what is loaded once and for all
    finder = Finder()
    live_with(finder, executor)
    places = sorted(finder.places, key=str)[part::num_parts]
    gc.collect()
    gc.freeze()  # so that looking for garbage is quick
    before = resources()
    num_interrupted = num_left = 0
    for place in places:
        print(place, file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
        num_interrupted += live_with(Interrupter(place), executor)
        with suppress(AssertionError):
            wait_for(lambda before=before: resources() == before, _PATIENCE_S / 2)  # type: ignore[misc]
        if resources() != before:
            print(f"{place}: {resources()} instead of {before}", flush=True)
            num_left += 1
            before = resources()
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(places)} places, interrupted at {num_interrupted}, something was left at {num_left}")
    sys.exit(num_left > 0)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
