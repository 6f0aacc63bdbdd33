"""How a worker ended, and whether another one may take its place. For executors whose workers can die while the trainer
lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from loaderkit._internal.config import keys
from loaderkit.errors import WorkerDiedError
from loaderkit.sampling.dealing import Place

_NUM_NAMED = 8  # samples in a message; the error has them all
_UNHARMED = (
    "The loader's state is unharmed: iterating again starts another one, with the next epoch; load_state_dict continues "
    "where this one stopped"
)


class Death(NamedTuple):
    """The end of a worker that the trainer did not ask for."""

    who: str
    what: str  # the predicate to `who`
    fix: str  # the likely cause, and what to do
    exit_code: int | None = None
    is_early: bool = False  # it had not begun to make batches
    may_pass: bool = True  # False: another one would end in the same way

    def error(self, happened: str = "", note: str = "", samples: Sequence[str] = ()) -> WorkerDiedError:
        """The error for it. `happened` completes its first clause, `note` is a sentence of its own."""
        text = f"{self.who} {self.what}{happened}: {self.fix}. {note}{_UNHARMED}"
        return WorkerDiedError(text, exit_code=self.exit_code, samples=samples)


class Restarts:
    """Allows `limit` restarts in all, of any worker, and none once two of them have died while they made the same batch."""

    def __init__(
        self,
        limit: int = 0,
        *,
        keys_at: Callable[[int, int], Sequence[str]] = lambda epoch, position: (),
        impossible: str = "",
    ) -> None:
        """`keys_at` names the samples of the batch at (epoch, position). `impossible` is a sentence that says why no batch can
        be made again, where that is so."""
        self.limit = limit
        self.num = 0  # so far
        self._keys_at = keys_at
        self._impossible = f"{impossible}. " if impossible else ""
        self._places: set[Place] = set()  # of the batches that workers died of

    def refuse(self, death: Death, place: Place) -> WorkerDiedError | None:
        """The error, if no other worker may take the dead one's place; else None, and one more restart is counted.
        `place` is the place of the first batch that it had not finished."""
        if not self.limit or self._impossible or not death.may_pass:
            return death.error(note=self._impossible if death.may_pass else "")
        making = "" if death.is_early else f" before it had finished {_say(place)}"
        if not death.is_early:
            samples = self._samples(place)
            if place in self._places:
                twice = f" before it had finished {_say(place)}{_listed(samples)}, and is the second that this batch has ended"
                return death.error(twice, "A third is not tried. ", samples)
            self._places.add(place)
            if self.num >= self.limit:
                making += _listed(samples)
        if self.num >= self.limit:
            note = f"All {self.limit} restarts of this run ({keys.RESTARTS}) are used up. "
            return death.error(making, note, () if death.is_early else samples)
        self.num += 1
        return None

    def describe(self, death: Death, place: Place, successor: str) -> str:
        """The warning after `refuse` has allowed a restart."""
        making = "" if death.is_early else f" before it had finished {_say(place)}"
        its_batches = f"its batches, from {_say(place)} on" if death.is_early else "its batches again from there on"
        return (
            f"{death.who} {death.what}{making}: {death.fix}. {successor} makes {its_batches}; {self.limit - self.num} of "
            f"{self.limit} restarts ({keys.RESTARTS}) are left in this run"
        )

    def _samples(self, place: Place) -> tuple[str, ...]:
        with suppress(Exception):  # the death is worth more than the names
            return tuple(self._keys_at(*place))
        return ()


def _say(place: Place) -> str:
    return f"the batch at position {place[1]} of epoch {place[0]}"


def _listed(samples: Sequence[str]) -> str:
    if not samples:
        return ""
    named = ", ".join(map(repr, samples[:_NUM_NAMED]))
    num_more = len(samples) - _NUM_NAMED
    return f" (samples {named}{f' and {num_more} more' if num_more > 0 else ''})"
