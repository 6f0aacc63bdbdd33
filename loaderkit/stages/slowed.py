"""Slows one stage down by a share of its own time, to measure how far the throughput falls: it falls if the stage limits.

After Coz (Curtsinger and Berger, "Coz: finding code that counts with causal profiling", SOSP 2015), which speeds up one line of
code virtually by slowing down all others. Here the one stage is slowed down instead, which leaves the others alone.

The added time must use the resource that limits: a wait where workers wait, CPU time without the GIL where they compute, CPU
time with the GIL where they hold it, and a wait under a lock where they run one at a time.
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
_BLOCK = bytes(2**16)  # 0.1 ms of hashing; above 2 KiB hashlib releases the GIL


@dataclass(frozen=True)
class Slowdown:
    """The `stage` takes 1 + `share` times as long."""

    stage: str
    share: float
    manner: Manner


def slowed(stage: Stage, slowdown: Slowdown | None) -> Stage:
    """The stage, slowed down if `slowdown` names it."""
    if slowdown is None or stage.name != slowdown.stage:
        return stage
    if slowdown.manner == "turns":
        return replace(stage, run=_one_by_one(stage.run, slowdown.share))
    clock = time.perf_counter if slowdown.manner == "wait" else time.thread_time
    return replace(stage, run=_longer(stage.run, slowdown.share, clock, _SPENDING[slowdown.manner]))


def _longer(
    run: Callable[..., Any], share: float, clock: Callable[[], float], spend: Callable[[float], None]
) -> Callable[..., Any]:
    def longer(*args: Any) -> Any:
        begin_s = clock()
        result = run(*args)
        spend(share * (clock() - begin_s))
        return result

    return longer


def _one_by_one(run: Callable[..., Any], share: float) -> Callable[..., Any]:
    lock = threading.Lock()

    def longer(*args: Any) -> Any:
        with lock:
            begin_s = time.perf_counter()
            result = run(*args)
            time.sleep(share * (time.perf_counter() - begin_s))
        return result

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
