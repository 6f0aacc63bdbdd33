"""Puts together, by line, what was sampled of one DataLoader: see sampling.py."""

from __future__ import annotations

import linecache
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loaderkit.diagnosis.watched.lines import COLLATE, COLLATE_FN, DECODE, OPEN, OTHER, TRANSFORM, CostlyLine, LineTimes
from loaderkit.profile.watched.sampling import CodePlace, Rows, Sampler, WorkerLines, sampled_init

_NUM_LINES = 20
_MOST_LETTERS = 120  # of a line
_PARTS = {"collate_fn(": COLLATE_FN, "__getitems__(": "__getitems__", "dataset_iter": "__iter__"}  # in torch's fetcher
_BY_TEXT = {
    DECODE: r"\b(\w*decode\w*|imread|decompress\w*|frombuffer|loads)\(",
    OPEN: r"\b(open|read\w*|load|memmap|fromfile|recv|get_object|urlopen|glob|listdir)\(",
    TRANSFORM: r"\b(resize\w*|\w*crop\w*|flip\w*|transforms?|normali[sz]e\w*|rotate\w*|pad|interpolate|warp\w*|cvtColor"
    r"|augment\w*|convert|permute|transpose|astype|clip)\(",
}
"""Functions in C have no frame, so the line that calls them has to say which one runs."""
_PACKAGES = re.compile(r".*[/\\](?:site-packages|dist-packages|python3\.\d+)[/\\]")


class LoaderLines:
    """The lines of one DataLoader. `sampler` is this process's sampler, which several loaders may share."""

    def __init__(self, sampler: Callable[[], Sampler], roots: Iterable[str]) -> None:
        self._sampler_of, self._roots = sampler, [*roots]
        self._sampler: Sampler | None = None  # of a loader without workers
        self._rows: Rows = {}
        self._workers: WorkerLines | None = None

    def resume(self) -> None:
        """This thread makes a batch from now on; only the main one is sampled."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._sampler is None:
            self._sampler = self._sampler_of()
        self._sampler.resume(self._rows)

    def open_workers(self, loader: Any, open_loader: Callable[[Any], Any]) -> Any:
        """Iterate over a DataLoader, whose workers sample themselves if there are any."""
        if not loader.num_workers:
            return open_loader(loader)
        try:
            if self._workers is None:
                self._workers = WorkerLines()
            original = loader.worker_init_fn
            loader.worker_init_fn = sampled_init(original, self._workers.path)
        except Exception:  # of a class of the script's own that allows nothing to be set; no file in memory
            return open_loader(loader)
        try:
            return open_loader(loader)
        finally:
            loader.worker_init_fn = original

    def times(self) -> LineTimes | None:
        """The lines so far; None if none was sampled."""
        rows, costs = dict(self._rows), []
        for values in () if self._workers is None else self._workers.read():
            costs.append((values["cost_s"], values["wall_s"]))
            for *fields, seconds, number in values["rows"]:
                place = CodePlace(*fields)
                before_s, before = rows.get(place, (0.0, 0))
                rows[place] = (before_s + seconds, before + number)
        if self._sampler is not None:
            costs.append((self._sampler.cost_s, self._sampler.wall_s))
        whole_s = sum(seconds for seconds, _ in rows.values())
        if whole_s <= 0:
            return None
        groups: dict[str, float] = {}
        for place, (seconds, _) in rows.items():
            group = _group_of(place)
            groups[group] = groups.get(group, 0.0) + 100 * seconds / whole_s
        lines = [self._line(places, whole_s) for places in _by_line(rows).values()]
        return LineTimes(
            is_of_workers=self._workers is not None,
            num_samples=sum(number for _, number in rows.values()),
            seconds=whole_s,
            cost_percent=100 * sum(cost_s for cost_s, _ in costs) / max(sum(wall_s for _, wall_s in costs), 1e-9),
            groups=dict(sorted(groups.items(), key=lambda item: -item[1])),
            lines=sorted(lines, key=lambda line: -line.seconds)[:_NUM_LINES],
        )

    def _line(self, places: Mapping[CodePlace, float], whole_s: float) -> CostlyLine:
        seconds = sum(places.values())
        most = max(places, key=places.__getitem__)
        return CostlyLine(
            place=f"{self._short(most.file)}:{most.line}",
            file=most.file,
            line=most.line,
            function=most.function,
            source=_source(most.file, most.line),
            part=_part_of(most),
            group=_longest(places, _group_of),
            inside=_longest(places, _say_inside),
            percent=100 * seconds / whole_s,
            seconds=seconds,
        )

    def _short(self, file: str) -> str:
        """From the script's own folder, or from the folder of packages."""
        for root in self._roots:
            if root and Path(file).is_relative_to(root):
                return os.path.relpath(file, root)
        return _PACKAGES.sub("", file)


def _by_line(rows: Rows) -> dict[tuple[str, int], dict[CodePlace, float]]:
    found: dict[tuple[str, int], dict[CodePlace, float]] = {}
    for place, (seconds, _) in rows.items():
        found.setdefault((place.file, place.line), {})[place] = seconds
    return found


def _longest(places: Mapping[CodePlace, float], name_of: Callable[[CodePlace], str]) -> str:
    sums: dict[str, float] = {}
    for place, seconds in places.items():
        sums[name_of(place)] = sums.get(name_of(place), 0.0) + seconds
    return max(sums, key=sums.__getitem__)


def _source(file: str, line: int) -> str:
    text = " ".join(linecache.getline(file, line).split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _part_of(place: CodePlace) -> str:
    text = linecache.getline(place.fetch_file, place.fetch_line)
    return next((part for mark, part in _PARTS.items() if mark in text), "__getitem__")


def _group_of(place: CodePlace) -> str:
    if place.group is not None:
        return place.group
    if _part_of(place) == COLLATE_FN:
        return COLLATE
    text = linecache.getline(place.file, place.line)
    return next((group for group, pattern in _BY_TEXT.items() if re.search(pattern, text)), OTHER)


def _say_inside(place: CodePlace) -> str:
    module = _PACKAGES.sub("", place.inside_file).removesuffix(".py").removesuffix("/__init__").replace(os.sep, ".")
    return f"{module}.{place.inside}" if place.inside else ""
