"""Runs steps, each in a process group of its own, and writes a line of JSON on each as soon as it has ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.gpu_session.steps import Step

Line = dict[str, Any]
_END = 3000  # characters of what a step said that its line keeps
_MOST_LOGGED = 400_000
_LEAST_S = 8.0  # a process that imports torch comes to nothing in less
_GRACE_S = 3.0


@dataclass(frozen=True)
class Place:
    """`out` is for results; `work` and `fast` (in memory, if there is room) are emptied by whoever runs the session."""

    out: Path
    work: Path
    fast: Path

    def report(self, step: Step) -> Path:
        """Where the step's process writes its figures, after each of them."""
        return self.work / f"{step.name}.json"


Command = Callable[[Step, float], list[str]]
"""The command of a step's process, which has so many seconds."""


def run_steps(
    steps: Sequence[Step],
    command: Command,
    place: Place,
    *,
    budget_s: float,
    each: Callable[[Line], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Line]:
    """Run the steps one after another within `budget_s` seconds; `each` is called with every line once it is on the disk."""
    until_s, lines = clock() + budget_s, []
    for step in steps:
        left_s = until_s - clock()
        line = (
            {"name": step.name, "part": step.part, "outcome": "not run", "why": "no time"}
            if left_s < min(_LEAST_S, step.limit_s)
            else run_step(step, command, place, limit_s=min(step.limit_s, left_s))
        )
        _append(place.out / "gpu.jsonl", json.dumps(line) + "\n")
        lines.append(line)
        each(line)
    return lines


def run_step(step: Step, command: Command, place: Place, *, limit_s: float) -> Line:
    """One step in a process of its own, which is killed with all that it started after `limit_s` seconds."""
    log = place.work / f"{step.name}.log"
    begin_s = time.monotonic()
    with log.open("wb") as said:
        process = subprocess.Popen(
            command(step, limit_s), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        is_late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _kill_group(process)
    rc = process.wait()
    seconds = time.monotonic() - begin_s
    text = log.read_text(errors="replace")
    _append(place.out / "gpu.log", f"===== {step.name}: rc {rc}, {seconds:.1f} s\n{text[-_MOST_LOGGED:]}\n")
    report = _read_report(place.report(step))
    _empty(place.fast)
    line: Line = {"name": step.name, "part": step.part, "outcome": _outcome(rc, is_late, report)}
    line |= {"rc": rc, "seconds": round(seconds, 2), "limit_s": round(limit_s, 1), **report}
    return line | {"stderr": text[-_END:]}


def _outcome(rc: int, is_late: bool, report: Line) -> str:
    if is_late:
        return "timed out"
    if rc < 0:
        return f"crashed ({signal.Signals(-rc).name})"
    if rc > 0:
        return "failed"
    return "skipped" if report.get("skipped") else "passed"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End all that a step has left running. A process that waits for the driver may not end at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _read_report(path: Path) -> Line:
    try:
        found: Line = json.loads(path.read_text())
    except FileNotFoundError:
        return {"figures": {}, "bars": []}
    return found


def _append(path: Path, text: str) -> None:
    """Written out at once: what ends this process, or the machine's lease, finds it on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    """Files in memory that a killed step has left take the room of the next one's."""
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
