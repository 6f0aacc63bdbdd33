"""The saved position of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from loaderkit._internal.text import short_repr
from loaderkit.errors import StateError

STATE_VERSION = 1


@dataclass(frozen=True)
class State:
    """The position of training: `position` samples of `epoch` have been delivered, counted over all ranks."""

    epoch: int
    position: int
    seed: int
    fingerprint: dict[str, str]
    source: tuple[Any, ...] | None = None  # the source's own state there, if it has one; None: a source that never has

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON values, if the source's own state is one. The fingerprint is a list, as torch.distributed.checkpoint
        flattens dicts: its load would fail for want of a part's key before `check` could name the difference. The source's own
        state is in a tuple, which it leaves whole, and always there: it loads only what a fresh loader's state has."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "fingerprint": [list(part) for part in self.fingerprint.items()],
            **({} if self.source is None else {"source": self.source}),
        }

    @classmethod
    def from_dict(cls, data: object) -> State:
        """Raises `StateError` naming what is missing or malformed."""
        if not isinstance(data, dict):
            raise StateError(f"a loader's state is a dict made by state_dict(), not {type(data).__name__}")
        if data.get("version") != STATE_VERSION:
            raise StateError(
                f"the state has version {short_repr(data.get('version'))}, this loaderkit reads version {STATE_VERSION}: "
                "resume with the release that wrote it"
            )
        for name in ("epoch", "position", "seed"):
            value = data.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or not (name == "seed" or 0 <= value < 2**62):
                raise StateError(f"the state's {name!r} is {short_repr(value)}, expected a whole number")
        try:
            fingerprint = dict(data["fingerprint"])  # a dict, too, as it was once
        except (KeyError, TypeError, ValueError):
            fingerprint = None
        if fingerprint is None or any(type(part) is not str for part in chain(*fingerprint.items())):
            raise StateError("the state's 'fingerprint' is missing: it was not made by a loader's state_dict()")
        source = data.get("source")
        if not (source is None or (isinstance(source, (list, tuple)) and len(source) <= 1)):
            raise StateError(f"the state's 'source' is {short_repr(source)}, expected a list of at most one state")
        return cls(
            data["epoch"], data["position"], data["seed"], fingerprint, None if source is None else tuple(source)
        )

    def check(self, *, seed: int, fingerprint: dict[str, str], num_samples: int) -> None:
        """Raise `StateError` naming what differs, if this state belongs to another data set or pipeline."""
        differences = [
            f"{part}: the state has {before}, this loader {now}"
            for part in sorted({*self.fingerprint, *fingerprint})
            if (part != "classes" or part in self.fingerprint)  # once states had them in the digest of `data` alone
            for before, now in [_apart(part, self.fingerprint.get(part, "nothing"), fingerprint.get(part, "nothing"))]
            if before != now
        ]
        if self.seed != seed:
            differences.append(f"seed: the state has {short_repr(self.seed)}, this loader {seed}")
        if not differences and self.position > num_samples:
            differences.append(f"position: the state has {self.position}, the data set only {num_samples} samples")
        if differences:
            raise StateError(
                "this state belongs to another data set or pipeline, and resuming from it would repeat or skip samples; "
                "it differs in " + "; ".join(differences)
            )


def _apart(part: str, before: str, now: str) -> tuple[str, str]:
    """Both values of a part; of the sources of a mixture and its changes only those that differ, if that is not their order."""
    if part not in ("sources", "mix") or before == now:
        return before, now
    words, words_now = before.split(), now.split()
    gone = [word for word in words if word not in words_now]
    new = [word for word in words_now if word not in words]
    return (" ".join(gone) or "no others", " ".join(new) or "no others") if gone or new else (before, now)
