"""A loader as an endpoint shows it."""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

from loaderkit.diagnosis.stats import Stats
from loaderkit.metrics.families import Point, gauges
from loaderkit.metrics.totals import Totals

logger = logging.getLogger("loaderkit")


class ScrapedLoader(Protocol):
    """What a scrape reads of a loader."""

    @property
    def epoch(self) -> int: ...

    def stats(self) -> Stats: ...


class ExportedLoader:
    """Reads a loader's statistics when they are asked for, and keeps its counters when it has gone.

    `name` and `rank` are its labels. It holds no reference to the loader.
    """

    def __init__(self, name: str, rank: int, action: str, first: Stats, totals: Totals) -> None:
        """`action` is `errors.on_bad_sample`; `first` the statistics before anything has run."""
        self.name = name
        self.rank = rank
        self.totals = totals
        self._action = action
        self._first = first
        self._loader: weakref.ref[ScrapedLoader] | None = None
        self.has_run = False  # True: an executor was made, so there are statistics
        self.is_open = True
        totals.begin(first, action)

    def attach(self, loader: ScrapedLoader) -> None:
        """Read this loader from now on."""
        self._loader = weakref.ref(loader)

    def before_run(self) -> None:
        """An executor is about to be made. The counts of the earlier executor are added now, as they are lost afterwards."""
        if self.has_run:
            self._read()

    def close(self) -> None:
        """The loader has been closed, or is gone: its last counters stay."""
        if self.has_run:
            self._read()
        self.is_open = False

    def points(self) -> list[Point]:
        """Its metrics now; once it is closed, its counters."""
        loader = None if self._loader is None else self._loader()
        stats = self._read() if self.has_run else self._first
        points = self.totals.points()
        if self.is_open and loader is not None and stats is not None:
            points += gauges(stats, loader.epoch)
        return points

    def _read(self) -> Stats | None:
        """Read the loader's statistics and add them; None if it has none."""
        loader = None if self._loader is None else self._loader()
        if loader is None or not self.is_open:
            return None
        try:
            stats = loader.stats()
        except Exception:  # it is being closed, or a process does not answer: no reason to end training, or a scrape
            logger.debug("the statistics of %s could not be read", self.name, exc_info=True)
            return None
        self.totals.add(stats, self._action)
        return stats
