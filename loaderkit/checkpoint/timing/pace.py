"""What a run has measured of its saves and interruptions, and what follows from it: how often to save, and how much once a
notice has come. Rank 0 decides; what it knows goes into each checkpoint, for the next start."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from loaderkit._internal.units import say_seconds
from loaderkit.checkpoint.timing.costs import CostLog, Extent, SaveCost, extents, most_within
from loaderkit.checkpoint.timing.interval import Interruptions

logger = logging.getLogger("loaderkit")
_FIRST_S = 60.0  # until the first save, by which is measured what one costs
_LEAST_S = 1.0
_ONE_IN_S = 86400.0  # what is supposed before anything is known: one interruption in that time
_USED = 0.9  # of the time left: the rest is for the end of the program
_TOLD = 1.2  # an interval is told again when it has changed so much


class UploadTimes(Protocol):
    """What uploads take, of `Tiers`."""

    def upload_s(self, chosen: Callable[[Iterable[float]], float]) -> float | None:
        """Of what the last ones have taken; None: there was none."""

    def upload_running_s(self) -> float | None:
        """For how long one has been running; None: none is."""


class SavePace:
    """The measured costs of a run, and its interruptions."""

    def __init__(
        self,
        uploads: UploadTimes,
        *,
        mtbf_s: float | None = None,
        has_local: bool = False,
        uploads_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        """`mtbf_s`: None: learned. `time_of_day` gives seconds of Unix time."""
        self.costs = CostLog()
        self._uploads, self._given_s = uploads, mtbf_s
        self._has_local, self._uploads_all = has_local, uploads_all
        self._clock, self._time_of_day = clock, time_of_day
        self._begin_s, self._before_s, self._num_interruptions = clock(), 0.0, 0
        self._told_s = 0.0
        self._has_warned = False

    def add(self, stats: Mapping[str, Any], shutdown_timeout_s: float | None) -> None:
        """A save of the whole state is committed; `stats` are `Saving.stats`. `shutdown_timeout_s`: how long torchrun lets its
        ranks live after a signal that counts as a notice."""
        self.costs.add(stats)
        cost = self.costs.slowest(self._uploads.upload_s(max))
        if cost is None or shutdown_timeout_s is None or self._has_warned:
            return
        needed_s = (cost.saving_s() + (cost.upload_s or 0.0)) / _USED
        if needed_s > shutdown_timeout_s:
            self._has_warned = True
            logger.warning(
                "a notice needs %s to save the whole state, and torchrun kills its ranks %s after the signal: start it with "
                "--shutdown-timeout %d, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT in its environment",
                *(say_seconds(needed_s), say_seconds(shutdown_timeout_s), int(needed_s) + 1),
            )

    # -------------------------------------------------------------------------------------------------- how often

    @property
    def mtbf_s(self) -> float:
        """Seconds from one interruption to the next: as given, or the time of this run by the number of its interruptions,
        beginning as if there had been one, a day before."""
        if self._given_s is not None:
            return self._given_s
        return (_ONE_IN_S + self._trained_s) / (1 + self._num_interruptions)

    @property
    def _trained_s(self) -> float:
        return self._before_s + self._clock() - self._begin_s

    def interval_s(self) -> float:
        """Seconds from one save to the next at which the least training is lost."""
        cost = self.costs.typical(self._uploads.upload_s(statistics.median))
        if cost is None:
            return _FIRST_S
        mtbf_s = self.mtbf_s
        best = Interruptions(
            cost.staging_s,
            cost.flush_s,
            mtbf_s,
            upload_s=cost.upload_s if self._has_local else None,
            uploads_all=self._uploads_all,
        )
        found_s = max(best.best_interval_s() + cost.staging_s, _LEAST_S)
        if not self._told_s / _TOLD < found_s < self._told_s * _TOLD:
            self._told_s = found_s
            logger.info(
                "every: auto: a save each %s, as one stops training for %s and takes %s behind it, with an interruption in %s",
                *map(say_seconds, (found_s, cost.staging_s, cost.flush_s, mtbf_s)),
            )
        return found_s

    # --------------------------------------------------------------------------------------------------- how much

    def extent(self, step: int, reason: str, end_s: float, weights_share: float | None) -> Extent:
        """What is saved of a state where the job must have ended at `end_s`, in seconds of Unix time; it is in the log.
        `weights_share` as for `extents`."""
        left_s = self.left_s(end_s)
        longest_s = self._uploads.upload_s(max)
        cost, running_s = self.costs.slowest(longest_s), self._uploads.upload_running_s()
        busy_s = 0.0 if running_s is None else max(0.0, (longest_s or running_s) - running_s)
        choices = extents(cost, weights_share=weights_share, has_local=self._has_local, busy_s=busy_s)
        chosen = most_within(choices, left_s)
        first = choices[0]
        is_all = chosen == first and chosen.seconds is not None and chosen.seconds <= left_s
        logger.log(
            logging.INFO if is_all else logging.WARNING,
            "after step %d (%s) %s are left to save: %s, which %s%s",
            *(step, reason, say_seconds(max(left_s, 0.0)), chosen, _said("takes", chosen.seconds)),
            "" if chosen == first else f"; {first} {_said('would take', first.seconds)}",
        )
        return chosen

    def left_s(self, end_s: float) -> float:
        """Seconds to save in, of those until `end_s`; the rest is for the end of the program."""
        return _USED * (end_s - self._time_of_day())

    # ------------------------------------------------------------------------------------------- from run to run

    def saved(self, *, is_end: bool) -> str:
        """What the next start is to know. `is_end`: a save after which the job may end, so that another start after it is no
        interruption."""
        cost = self.costs.typical(self._uploads.upload_s(statistics.median))
        said = {
            "cost": {} if cost is None else cost.saved(),
            "trained_s": round(self._trained_s, 3),
            "num_interruptions": self._num_interruptions,
            "is_end": is_end,
        }
        return json.dumps(said)

    def resume(self, saved: str | None) -> None:
        """Go on from what the restored checkpoint has; anything else than what `saved` gave counts as nothing."""
        try:
            said = json.loads(saved or "")
            self._before_s = float(said["trained_s"])
            self._num_interruptions = int(said["num_interruptions"]) + (not said["is_end"])
            self.costs.before = SaveCost.restored(said["cost"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return


def _said(takes: str, seconds: float | None) -> str:
    return "was never timed" if seconds is None else f"{takes} {say_seconds(seconds)}"
