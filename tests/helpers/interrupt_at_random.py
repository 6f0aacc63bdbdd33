"""A program that is interrupted at random moments of a loader's life, from building to closing, as in a notebook: the
interpreter lives on, so whatever is left of a loader would stay.

    python interrupted.py EXECUTOR SEED NUM_ROUNDS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from executors import EXECUTORS
from leftovers import resources
from numbers_dataset import numbers
from waiting import wait_for

import loaderkit


def live(executor: str) -> float:
    """One life without an interruption; how long it took, in s."""
    begin = time.perf_counter()
    patient = EXECUTORS[executor] | {
        "prefetch.timeout": "1h"
    }  # a busy machine starts processes slowly: no warning of that
    with loaderkit.build(numbers(4000), overrides=patient) as loader:
        for number, _ in enumerate(loader):
            if number == 40:
                loader.set_epoch(3)
                break
        for number, _ in enumerate(loader):
            if number == 40:
                break
    return time.perf_counter() - begin


def interrupt(executor: str, delay_s: float) -> bool:
    """One life, interrupted after so long; whether it was."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    was_interrupted = True
    try:
        timer.start()
        live(executor)
        was_interrupted = False
        timer.join()
    except KeyboardInterrupt:
        pass
    return was_interrupted


def pass_over(unraisable: sys.UnraisableHookArgs) -> None:
    """Not ours to tell: Ctrl-C inside a destructor is lost, and a file that it takes from us is closed by Python."""
    if not issubclass(unraisable.exc_type, (KeyboardInterrupt, ResourceWarning)):
        sys.__unraisablehook__(unraisable)


def main(executor: str, seed: int, num_rounds: int) -> None:
    warnings.simplefilter("error")
    sys.unraisablehook = pass_over
    chance = random.Random(seed)
    live(executor)  # what is loaded once and for all
    whole_s = live(executor)
    before = resources()
    num_interrupted = num_lives = 0
    while num_interrupted < num_rounds:  # where it goes quicker than it did, it has ended before
        num_interrupted += interrupt(executor, chance.uniform(0, whole_s))
        num_lives += 1
        with suppress(AssertionError):
            wait_for(lambda: resources() == before, 10)
        assert resources() == before, (num_lives, resources(), before, threading.enumerate())
        assert num_lives < 10 * num_rounds, (num_interrupted, num_lives)
    print(num_interrupted)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
