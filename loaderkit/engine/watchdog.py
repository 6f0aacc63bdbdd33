"""Reports a long wait: the stage of every unfinished chunk of the awaited batch, and the threads' stacks."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from loaderkit._internal.config import keys
from loaderkit.engine.work import Chunk, WorkItem
from loaderkit.errors import StallTimeout

_WARN_SHARE = 0.25  # of the limit
logger = logging.getLogger("loaderkit")


class HangReport(NamedTuple):
    """A text of several lines, and the stage and sample of the least advanced chunk, where known."""

    text: str
    stage: str | None = None
    key: str | None = None


class Patience:
    """One wait, for a batch or a sample: how long to wait until the next look, and when to warn or raise.

    A quarter of the limit passes until the first warning, the limit until the second, which is the error if `raises`; then
    a warning comes whenever the limit has passed again.
    """

    def __init__(self, limit_s: float, raises: bool, noun: str = "batch") -> None:
        self._noun = noun
        self._limit_s = limit_s
        self._raises = raises
        self._waited_s = 0.0
        self.next_s = _WARN_SHARE * limit_s

    def ends(self, report: Callable[[], HangReport]) -> None:
        """Call after `next_s` has passed: logs a warning, or raises `StallTimeout` at the limit if `raises`."""
        self._waited_s += self.next_s
        hang = report()
        where = f", it is in {hang.stage}" if hang.stage is not None else ""
        where += f", at sample {hang.key!r}" if hang.key is not None else ""
        text = f"no {self._noun} for {self._waited_s:g} s{where} ({keys.TIMEOUT} is {self._limit_s:g} s)\n{hang.text}"
        is_over = self._waited_s >= self._limit_s
        if is_over and self._raises:
            raise StallTimeout(text, waited_s=self._waited_s, stage=hang.stage, key=hang.key)
        logger.warning("%s", text)
        self.next_s = self._limit_s if is_over else self._limit_s - self._waited_s


def describe_wait(
    work_item: WorkItem | None,
    now_s: float,
    *,
    preparing: tuple[str, Chunk] | None = None,
    stage_names: Sequence[str],
    key_of: Callable[[int], str],
    threads: Iterable[threading.Thread],
) -> HangReport:
    """A report on the awaited batch, or on `preparing`, the stage and the chunk before the first; chunks may move meanwhile."""
    lines = []
    stage = key = None
    if work_item is None and preparing is not None:
        stage, chunk = preparing
        keys_at = keys_of(chunk, key_of)
        key = keys_at[0] if len(keys_at) == 1 else None
        at = " to ".join(map(repr, keys_at))
        lines.append(f"the first samples are looked at for what a batch holds: in {stage}, at sample {at}")
    elif work_item is None:
        lines.append("no batch has been opened yet")
    else:
        lines.append(f"awaited: {work_item}, {work_item.num_pending} chunks left")
        inside = [chunk for chunk in work_item.chunks if chunk.marks and not chunk.has_landed]
        for chunk in inside:
            since, state = chunk.marks[-1]
            where = stage_names[state] if state >= 0 else "a queue"
            keys = " to ".join(map(repr, keys_of(chunk, key_of)))
            lines.append(f"  {chunk}: in {where} for {now_s - since:.1f} s, at sample {keys}")
        lines += [f"  {chunk}: taken by no worker yet" for chunk in work_item.chunks if not chunk.marks]
        if inside:
            last = min(inside, key=lambda chunk: len(chunk.marks))
            state = last.marks[-1][1]
            stage = stage_names[state] if state >= 0 else None
            keys_at = keys_of(last, key_of)
            key = keys_at[0] if len(keys_at) == 1 else None
    lines += [stack_of(thread) for thread in threads]
    return HangReport("\n".join(lines), stage, key)


def keys_of(chunk: Chunk, key_of: Callable[[int], str]) -> list[str]:
    """The key of the sample a stage works on; or the keys of the first and the last if it takes all at once."""
    current = chunk.current  # a worker may write it meanwhile
    if isinstance(current, list):
        current = min(len(current), len(chunk) - 1)
    rows = (0, len(chunk) - 1) if current is None else (current,)
    return [key_of(chunk.index_of(row)) for row in dict.fromkeys(rows)]


def stack_of(thread: threading.Thread) -> str:
    """The Python stack of a thread, innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"{thread.name}: not running"
    return f"{thread.name}:\n" + "".join(traceback.format_stack(frame)[-6:]).rstrip()
