"""What to say when a wait gets long: where every unfinished chunk of the awaited batch is, and what the threads do."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from loaderkit.types import Destination


def describe_wait(
    destination: Destination | None,
    now_s: float,
    *,
    stage_names: Sequence[str],
    key_of: Callable[[int], str],
    threads: Iterable[threading.Thread],
) -> str:
    """A report of several lines on the awaited batch, as it stands while its chunks move on."""
    lines = []
    if destination is None:
        lines.append("no batch has been opened yet")
    else:
        lines.append(
            f"awaited: batch {destination.step} of epoch {destination.epoch}, {destination.num_pending} chunks left"
        )
        for chunk in destination.chunks:
            if chunk.marks and chunk.samples:
                since, state = chunk.marks[-1]
                place = stage_names[state] if state >= 0 else "a queue"
                at = chunk.place  # a worker writes it meanwhile
                ends = (0, len(chunk) - 1) if at is None else (at,)
                keys = " to ".join(repr(key_of(int(chunk.indices[n]))) for n in dict.fromkeys(ends))
                lines.append(
                    f"  slots {chunk.lo} to {chunk.hi}: in {place} for {now_s - since:.1f} s, at sample {keys}"
                )
            elif not chunk.marks:
                lines.append(f"  slots {chunk.lo} to {chunk.hi}: taken by no worker yet")
    lines += [stack_of(thread) for thread in threads]
    return "\n".join(lines)


def stack_of(thread: threading.Thread) -> str:
    """The Python stack of a thread, innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"{thread.name}: not running"
    return f"{thread.name}:\n" + "".join(traceback.format_stack(frame)[-6:]).rstrip()
