"""Save at one number of ranks, resume at another, and compare with what was not interrupted; without any loader's own imports.

A row is a tuple of whole numbers: the sample's (source 1,000,000 + number), or the tokens of a packed sequence, each of which
is in no other place. A step is the rows of all ranks.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

GLOBAL_BATCH = 240  # shared evenly by 1, 2, 3, 4, 5, 8 and 16 ranks
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)
NUM_STEPS, INTERRUPTED_AT = 10, 4
SOURCE_SIZES = (4800, 4800)
WEIGHTS, LATER_WEIGHTS = (0.7, 0.3), (0.3, 0.7)
NUM_DOCUMENTS = (10_000, 10_000)
LENGTH, BUFFER = 64, 256  # tokens of a sequence; documents or sequences that a packer looks at together
SCENARIOS = ("one source", "mixed", "packed", "mixed and packed", "weights changed")

Row = tuple[int, ...]
Step = list[Row]


class Asked(NamedTuple):
    """One part of a training: `num_steps` from the beginning, or from the states of all ranks of another part."""

    scenario: str
    world_size: int
    num_steps: int
    states: Sequence[Any] | None = None
    weights: tuple[float, float] = WEIGHTS
    other_world_size: int = 1  # that it was interrupted at, or is to be resumed at

    def state_of(self, rank: int) -> Any:
        """A copy of the state for a rank: its own at the same number of ranks, else that of the first."""
        assert self.states is not None
        return deepcopy(self.states[rank if len(self.states) == self.world_size else 0])

    @property
    def is_packed(self) -> bool:
        return "packed" in self.scenario

    @property
    def is_mixed(self) -> bool:
        return self.scenario not in ("one source", "packed")

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.world_size


class Given(NamedTuple):
    """Its steps, and the state of every rank at the end."""

    steps: list[Step]
    states: list[Any]


Run = Callable[[Asked], Given]


class NotOfferedError(Exception):
    """The peer has nothing of the kind."""


def document_lengths(source: int) -> list[int]:
    """Lognormal, of 16 tokens in the median and at most `LENGTH`."""
    lengths = np.random.default_rng(source).lognormal(2.8, 0.7, NUM_DOCUMENTS[source])
    found: list[int] = np.clip(lengths.astype(int), 1, LENGTH).tolist()
    return found


def documents(source: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Token i of document d of a source is 1,000,000,000 source + 1,000 d + i + 1."""
    for number, length in enumerate(document_lengths(source)):
        yield source * 1_000_000_000 + number * 1000 + 1 + np.arange(length, dtype=np.int64)


def samples(source: int) -> range:
    """The numbers that are the samples of a source."""
    return range(source * 1_000_000, source * 1_000_000 + SOURCE_SIZES[source])


def cells(
    run: Run, scenarios: Sequence[str], pairs: Sequence[tuple[int, int]], *, is_pairwise: bool
) -> Iterator[dict[str, Any]]:
    """What becomes of pairs of world sizes in each scenario. `is_pairwise`: a job is set up otherwise if it is to be resumed at
    another number of ranks."""
    for scenario in scenarios:
        known: dict[Asked, Given] = {}

        def remembered(asked: Asked, known: dict[Asked, Given] = known) -> Given:
            key = asked if is_pairwise else asked._replace(other_world_size=1)
            if key not in known:
                known[key] = run(asked)
            return known[key]

        for before, after in pairs:
            found = _cell(run, remembered, scenario, before, after)
            yield {"scenario": scenario, "before": before, "after": after, **found}


def _cell(run: Run, remembered: Run, scenario: str, before: int, after: int) -> dict[str, Any]:
    asked = Asked(scenario, before, NUM_STEPS, other_world_size=after)
    where = "uninterrupted"
    try:
        reference = remembered(asked)
        where = "interrupted"
        first = remembered(asked._replace(num_steps=INTERRUPTED_AT))
        if first.steps != reference.steps[:INTERRUPTED_AT]:
            return {"error": "two runs of the same job differ", "where": where}
        where = "resumed"
        weights = LATER_WEIGHTS if scenario == "weights changed" else WEIGHTS
        again = Asked(scenario, after, NUM_STEPS - INTERRUPTED_AT, first.states, weights, before)
        rest = run(again)
    except NotOfferedError as error:
        return {"not_offered": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": _said(error), "where": where}
    return _compared(reference.steps, first.steps, rest.steps, scenario)


def _compared(whole: list[Step], first: list[Step], rest: list[Step], scenario: str) -> dict[str, Any]:
    later = whole[INTERRUPTED_AT:]
    seen, wanted, found = (Counter(n for step in steps for row in step for n in row) for steps in (first, later, rest))
    same = [sorted(one) == sorted(other) for one, other in zip(later, rest, strict=False)]
    compared = {
        "num_steps": len(rest),
        "num_delivered": sum(found.values()),
        "num_again": sum((seen & found).values()),  # had been delivered before the interruption
        "num_again_uninterrupted": sum((seen & wanted).values()),
    }
    if scenario == "weights changed":
        rows = [row for step in rest for row in step]
        return {**compared, "share_of_first_source": sum(row[0] < 1_000_000 for row in rows) / max(1, len(rows))}
    return {
        **compared,
        "num_wanted": sum(wanted.values()),
        "num_missing": sum((wanted - found).values()),  # of those that the uninterrupted run has in these steps
        "num_same_steps": sum(same),
        "is_same": len(rest) == len(later) and all(same),
    }


def _said(error: BaseException) -> str:
    """Its type and the last line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
