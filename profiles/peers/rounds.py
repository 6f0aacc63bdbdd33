"""One work: start its contestants, warm them up, measure them in rounds, compare what they delivered."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.peers.child import Child, ContestantError
from profiles.peers.looks import differences
from profiles.peers.works import Contestant, Work

_STEP_S = 0.010
_MEMORY_BATCHES = 64
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Settings:
    """How a run is made: where the data is, how often and how long each contestant is measured, with which interpreters."""

    root: Path
    rounds: int
    seconds: float
    python_of: Callable[[str], Path]
    say: Callable[[str], None]


@dataclass
class Entry:
    """What came out for one contestant."""

    contestant: Contestant
    turns: dict[int, dict[str, Any]] = field(default_factory=dict)  # by round
    checks: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    error: str | None = None
    off: list[str] = field(default_factory=list)


def run(work: Work, contestants: Sequence[Contestant], settings: Settings) -> list[Entry]:
    """Measure a work. A contestant that fails keeps its error; the others go on."""
    entries = [Entry(contestant) for contestant in contestants]
    if work.mode in ("first", "first-epoch", "memory"):
        _run_afresh(work, entries, settings)
    else:
        _run_together(work, entries, settings)
    _compare(work, entries)
    return entries


def _run_together(work: Work, entries: list[Entry], settings: Settings) -> None:
    """All live at once; only the one whose turn it is runs."""
    children: list[tuple[Entry, Child]] = []
    iterations = 0
    try:
        for entry in entries:
            with _failing(entry, settings):
                child = Child(
                    settings.python_of(entry.contestant.environment), work, entry.contestant, settings.root, {}
                )
                children.append((entry, child))
                if work.mode == "busy" and not iterations:
                    iterations = child.ask("calibrate", seconds=_STEP_S)["iterations"]
                entry.version = child.ask("open", iterations=iterations)["version"]
                child.ask("warm", samples=work.warm)
        for number in range(settings.rounds):
            for entry, child in _rotated(children, number):
                if entry.error is None:
                    with _failing(entry, settings):
                        turn = child.ask("measure", skip=work.skip, seconds=settings.seconds, least=work.least)
                        entry.turns[number] = turn
                        _say_turn(work, entry, number, settings)
        for entry, child in children:
            if entry.error is None:
                with _failing(entry, settings):
                    entry.checks = child.ask("checks")
    finally:
        for _, child in children:
            child.end()


def _run_afresh(work: Work, entries: list[Entry], settings: Settings) -> None:
    """A new process for every turn, and for loaderkit a new directory for its indexes."""
    for number in range(settings.rounds):
        for entry in _rotated(entries, number):
            if entry.error is not None:
                continue
            with tempfile.TemporaryDirectory() as cache, _failing(entry, settings):
                environ = {"LOADERKIT_CACHE_DIR": cache}
                python = settings.python_of(entry.contestant.environment)
                child = Child(python, work, entry.contestant, settings.root, environ)
                try:
                    if work.mode == "memory":
                        entry.version = child.ask("open")["version"]
                        entry.turns[number] = child.ask("memory", batches=_MEMORY_BATCHES)
                    else:
                        child.ask("checks")  # when it answers, everything is imported
                        turn = child.ask("first", epoch=work.mode == "first-epoch")
                        entry.version = turn.pop("version")
                        entry.turns[number] = turn
                    entry.checks = child.ask("checks")
                finally:
                    child.end()
                _say_turn(work, entry, number, settings)


@contextmanager
def _failing(entry: Entry, settings: Settings) -> Iterator[None]:
    """A failure is the contestant's own."""
    try:
        yield
    except ContestantError as error:
        entry.error = str(error)
        settings.say(f"{entry.contestant.name} failed: {error}")


def _rotated(items: Sequence[Any], number: int) -> list[Any]:
    """Each round begins with another one, so that nobody always follows the same neighbour's heat."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def _say_turn(work: Work, entry: Entry, number: int, settings: Settings) -> None:
    value = value_of(work, entry.turns[number])
    settings.say(f"{work.name:<22} round {number + 1}: {entry.contestant.name:<24} {value:12.2f} {work.unit}")


def value_of(work: Work, turn: dict[str, Any]) -> float:
    """The figure of a turn, in the work's unit."""
    if work.mode == "memory":
        return float(max(turn["resident_bytes"], turn["all_processes_bytes"])) / 2**20
    if work.mode == "first":
        return float(turn["seconds"])
    return float(turn["samples"]) / float(turn["seconds"])


def reference_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """loaderkit's contestant that an entry is compared with: the one it names, else the first; None if it failed."""
    wanted = entry.contestant.against
    own = [other for other in entries if other.contestant.module == "ours"]
    found = [other for other in own if other.contestant.name == wanted] or own[:1]
    return found[0] if found and found[0].error is None else None


def ratios(work: Work, entry: Entry, reference: Entry) -> list[float]:
    """How many times as good loaderkit is, round by round: of speeds its own by the other's, of times and memory reversed."""
    shared = sorted(entry.turns.keys() & reference.turns.keys())
    found = [value_of(work, reference.turns[n]) / value_of(work, entry.turns[n]) for n in shared]
    return [1 / ratio for ratio in found] if work.mode in ("first", "memory") else found


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and most; None of nothing."""
    if not values:
        return None
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _compare(work: Work, entries: list[Entry]) -> None:
    """Fill in what shows that a contestant did other work than its reference, or kept more memory than promised."""
    for entry in entries:
        reference = reference_of(entry, entries)
        if entry.error is not None:
            continue
        if reference is not None and entry is not reference and entry.contestant.look is None:
            entry.off = differences(reference.checks, entry.checks)
        for turn in entry.turns.values():
            if "slab_bytes" in turn:
                bound = (turn["batches"] + 2) * turn["slab_bytes"] + _SPARE_BYTES
                if turn["resident_bytes"] > bound:
                    entry.off.append(
                        f"{turn['resident_bytes']:,} bytes where (batches + 2) slabs + 64 MiB are {bound:,}"
                    )
