"""The saved position of a loader."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from loaderkit._internal.text import short_repr
from loaderkit.errors import ConfigError, StateError

STATE_VERSION = 1
_NUM = re.compile(r'"num": (\d+)')
logger = logging.getLogger("loaderkit")


@dataclass(frozen=True)
class State:
    """The position of training: `position` samples of `epoch` have been delivered, counted over all ranks."""

    epoch: int
    position: int
    seed: int
    fingerprint: dict[str, str]
    source: tuple[Any, ...] | None = None  # the source's own state there, if any; None for a source that never has one

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON values, if the source's own state is one. The fingerprint is a list, as torch.distributed.checkpoint
        flattens dicts: its load would fail for a missing key before `check` could name the difference. The source's own
        state is in a tuple, because torch does not flatten tuples, and is always there, because torch loads only what a
        fresh loader's state has."""
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

    def check(
        self,
        *,
        seed: int,
        fingerprint: dict[str, str],
        num_samples: Callable[[int], int],
        accept: Collection[str] | str = (),
    ) -> None:
        """Raise `StateError` naming what differs, if this state belongs to another data set or pipeline, unless all of
        it is in `accept`, which gives a warning. `num_samples` of an epoch is called last, as it may take a plan of all
        epochs before. Raises ConfigError for a name in `accept` that no part has."""
        if not isinstance(accept, Collection):
            raise ConfigError(f"accept={accept!r}: expected the names of what may differ, such as ['seed', 'mix']")
        accept = {accept} if isinstance(accept, str) else set(accept)
        _check_names(accept, {*self.fingerprint, *fingerprint})
        is_same_data = all(self.fingerprint.get(part) == fingerprint.get(part) for part in ("data", "sources"))
        parts = {
            part: _apart(part, self.fingerprint.get(part, "nothing"), fingerprint.get(part, "nothing"))
            for part in sorted({*self.fingerprint, *fingerprint})
            if (part != "classes" or part in self.fingerprint)  # earlier states had them in the digest of `data` alone
            if not (part == "bad_shards" and is_same_data)  # another way to leave out the same
        }
        differences = {part: pair for part, pair in parts.items() if pair[0] != pair[1]}
        if self.seed != seed:
            differences["seed"] = short_repr(self.seed), str(seed)
        refused = {part: pair for part, pair in differences.items() if not _is_accepted(part, accept)}
        unit, unit_now = _unit(self.fingerprint), _unit(fingerprint)
        if self.position and unit != unit_now:
            raise StateError(
                f"this state counts {unit}, and this loader {unit_now}: position {self.position} of epoch {self.epoch} is no "
                f"place here, which cannot be accepted. Begin with the next epoch: set_epoch({self.epoch + 1})"
            )
        if not refused and self.position > (num := num_samples(self.epoch)):
            differences["position"] = str(self.position), f"only {num} {unit}"
            refused = {} if "position" in accept else {"position": differences["position"]}
        if refused:
            raise StateError(self._refusal(refused, differences))
        if differences:
            logger.warning(
                "resuming from a state that differs in %s, as accepted: training goes on at position %d of epoch %d of this "
                "loader's own order%s",
                ", ".join(differences),
                self.position,
                self.epoch,
                ", so samples of the epoch may come twice or not at all" if _moves_samples(differences) else "",
            )

    def _refusal(self, refused: dict[str, tuple[str, str]], differences: dict[str, tuple[str, str]]) -> str:
        effect = (
            "this state belongs to another data set or pipeline, and resuming from it would repeat or skip samples"
            if _moves_samples(refused)
            else "this state belongs to another pipeline: resuming from it, the right samples would come, made in another way"
        )
        said = "; ".join(
            f"{part}: the state has {before}, {'the data set' if part == 'position' else 'this loader'} {now}"
            for part, (before, now) in refused.items()
        )
        hint = ""
        if set(refused) == {"mix"} and not self.epoch:
            hint = (
                " Other weights from here on need no acceptance: leave those of the sources as they were, and add them to "
                "`mix.changes`, at a position that has not come yet."
            )
        if "bad_shards" in refused:
            hint = (
                " To go on exactly, let the same shards be left out, also by `include`; to read what was mended, begin with "
                f"the next epoch: set_epoch({self.epoch + 1})."
            )
        return (
            f"{effect}; it differs in {said}.{hint} To go on nevertheless, at position {self.position} of epoch {self.epoch} "
            f"of this loader's own order: load_state_dict(state, accept={sorted(differences)})"
        )


_PARTS = (
    "bad_shards",
    "batches",
    "classes",
    "data",
    "fields",
    "lengths",
    "mix",
    "order",
    "position",
    "seed",
    "sources",
    "stages",
)


def _check_names(accept: Collection[str], parts: Collection[str]) -> None:
    known = {*_PARTS, *parts}
    for name in accept:
        if name not in known and not (isinstance(name, str) and name.startswith("stages.")):
            raise ConfigError(
                f"load_state_dict: accept names {short_repr(name)}, which no state has: {', '.join(sorted(known))}"
            )


def _unit(fingerprint: dict[str, str]) -> str:
    """What a position counts."""
    if "batches" in fingerprint:
        return "batches"
    stages = [value for part, value in fingerprint.items() if part.startswith("stages.")]
    if any(value.startswith("pack ") for value in stages):
        return "sequences"
    nums = [_NUM.search(value) for value in stages if value.startswith("expand ")]
    return "".join(["samples", *(f" of which {num[1]} are made of one" for num in nums if num is not None)])


def _is_accepted(part: str, accept: Collection[str]) -> bool:
    return part in accept or (part.startswith("stages.") and "stages" in accept)


def _moves_samples(differences: dict[str, tuple[str, str]]) -> bool:
    """False if only what is made of the samples differs, and not their order."""
    return any(
        part not in ("classes", "fields", "stages")
        and (not part.startswith("stages.") or any(value.startswith(("pack ", "batch ", "expand ")) for value in pair))
        for part, pair in differences.items()
    )


def _apart(part: str, before: str, now: str) -> tuple[str, str]:
    """Both values of a part. For the sources of a mixture and its changes only the entries that differ, unless only
    their order does."""
    if part not in ("sources", "mix") or before == now:
        return before, now
    words, words_now = before.split(), now.split()
    gone = [word for word in words if word not in words_now]
    new = [word for word in words_now if word not in words]
    return (" ".join(gone) or "no others", " ".join(new) or "no others") if gone or new else (before, now)
