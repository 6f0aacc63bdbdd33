"""A stage made slower on purpose, by a share of its own time: whoever is the bottleneck takes the throughput along.

After Coz (Curtsinger and Berger, "Coz: finding code that counts with causal profiling", SOSP 2015), which speeds one piece of
code up virtually by slowing down all others. Here the one piece is slowed down instead, which needs no hold on the others.

What it takes longer has to be of the kind that limits, or it would find room where there is plenty: a wait where workers wait,
CPU time without Python's lock where they compute, CPU time under it where they hold it, and a wait in which nobody else may
enter the stage where they take turns anyway.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from loaderkit.engine.work import Stage

Manner = Literal["wait", "compute", "gil", "turns"]
_BLOCK = bytes(2**16)  # 0.1 ms of hashing; above 2 KiB hashlib lets go of the lock


@dataclass(frozen=True)
class Slowdown:
    """The `stage` takes 1 + `share` times as long."""

    stage: str
    share: float
    manner: Manner


def stretched(stage: Stage, stretch: Slowdown | None) -> Stage:
    """The stage, slower if it is the one that is meant."""
    if stretch is None or stage.name != stretch.stage:
        return stage
    if stretch.manner == "turns":
        return replace(stage, run=_one_by_one(stage.run, stretch.share))
    clock = time.perf_counter if stretch.manner == "wait" else time.thread_time
    return replace(stage, run=_longer(stage.run, stretch.share, clock, _SPENDING[stretch.manner]))


def _longer(
    run: Callable[..., Any], share: float, clock: Callable[[], float], spend: Callable[[float], None]
) -> Callable[..., Any]:
    def longer(*args: Any) -> Any:
        begin_s = clock()
        found = run(*args)
        spend(share * (clock() - begin_s))
        return found

    return longer


def _one_by_one(run: Callable[..., Any], share: float) -> Callable[..., Any]:
    lock = threading.Lock()

    def longer(*args: Any) -> Any:
        with lock:
            begin_s = time.perf_counter()
            found = run(*args)
            time.sleep(share * (time.perf_counter() - begin_s))
        return found

    return longer


def _compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        hashlib.blake2b(_BLOCK)


def _hold_the_gil(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


_SPENDING: dict[Manner, Callable[[float], None]] = {"wait": time.sleep, "compute": _compute, "gil": _hold_the_gil}
