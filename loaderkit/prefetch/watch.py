"""What to say when a wait gets long: where every unfinished chunk of the awaited batch is, and what the threads do."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from loaderkit.types import Destination

if TYPE_CHECKING:
    from loaderkit.prefetch.engine import Engine


def describe_wait(destination: Destination | None, engine: Engine) -> str:
    """A report of several lines. The engine's lock is held by the caller."""
    lines = []
    if destination is None:
        lines.append("no batch has been opened yet")
    else:
        now = engine.clock()
        lines.append(
            f"awaited: batch {destination.step} of epoch {destination.epoch}, {destination.num_pending} chunks left"
        )
        for chunk in destination.chunks:
            if chunk.marks and chunk.samples:
                since, state = chunk.marks[-1]
                place = engine.stages[state].name if state >= 0 else "a queue"
                keys = ", ".join(repr(engine.plan.key(index)) for index in chunk.indices[:4].tolist())
                lines.append(
                    f"  slots {chunk.lo} to {chunk.hi}: in {place} for {now - since:.1f} s, samples {keys} ..."
                )
            elif not chunk.marks:
                lines.append(f"  slots {chunk.lo} to {chunk.hi}: taken by no worker yet")
    lines += [stack_of(thread) for pool in engine.pools for thread in pool.threads]
    return "\n".join(lines)


def stack_of(thread: threading.Thread) -> str:
    """The Python stack of a thread, innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"{thread.name}: not running"
    return f"{thread.name}:\n" + "".join(traceback.format_stack(frame)[-6:]).rstrip()
