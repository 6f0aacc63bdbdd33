"""How often to save: the interval at which the least training is lost, to pauses and to interruptions.

By Young (1974) and Daly (A higher order estimate of the optimum checkpoint interval for restart dumps, 2006), with a save that
goes on behind training and two places: training stops for `pause_s` alone; what an interruption loses is what came after the
newest checkpoint that is committed, in `local`, or in `to` where the machine is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOST_MACHINES = 0.25
"""The share of interruptions after which `local` is gone: with DLRover three of four faults were cured by another start of the
process."""


@dataclass(frozen=True)
class Interruptions:
    """What a job saves and loses, in seconds: `pause_s` of training a save; `flush_s` from the pause to the commit; `upload_s`
    from there to `to`, None without `local`; `mtbf_s` from one interruption to the next; `restart_s` until training goes on.
    `lost_machines`: the share of interruptions after which `local` is gone. `uploads_all`: no checkpoint is passed over
    because a newer one waits."""

    pause_s: float
    flush_s: float
    mtbf_s: float
    upload_s: float | None = None
    restart_s: float = 0.0
    lost_machines: float = LOST_MACHINES
    uploads_all: bool = False

    @property
    def least_interval_s(self) -> float:
        """Saves, or uploads of all of them, would queue up at shorter ones."""
        least_s = max(self.flush_s - self.pause_s, 0.0)
        return max(least_s, (self.upload_s or 0.0) - self.pause_s) if self.uploads_all else least_s

    def lost_share(self, interval_s: float) -> float:
        """The share of training lost where `interval_s` of training lie between two saves; may exceed 1."""
        period_s = max(interval_s + self.pause_s, 1e-9)
        redone_s = interval_s / 2 + self.flush_s
        if self.upload_s is not None:
            # One at a time is uploaded. Where that takes longer than from save to save, what is in `to` is older by half of it.
            waits_s = self.upload_s / 2 if self.upload_s > period_s else 0.0
            redone_s += self.lost_machines * (self.upload_s + waits_s)
        return self.pause_s / period_s + (redone_s + self.restart_s) / self.mtbf_s

    def best_interval_s(self) -> float:
        """Seconds of training between two saves at which the least is lost."""
        daly_s = self._daly_s()
        choices = [daly_s]
        if self.upload_s is not None:
            choices.append(max(daly_s, self.upload_s - self.pause_s))  # with every save uploaded as it comes
        least_s = self.least_interval_s
        return min((max(choice, least_s) for choice in choices), key=self.lost_share)

    def _daly_s(self) -> float:
        """The optimum without `local`, and without a bound by the time of a flush."""
        if self.pause_s >= 2 * self.mtbf_s:
            return self.mtbf_s
        root = math.sqrt(self.pause_s / (2 * self.mtbf_s))
        return max(math.sqrt(2 * self.pause_s * self.mtbf_s) * (1 + root / 3 + root**2 / 9) - self.pause_s, 0.0)
