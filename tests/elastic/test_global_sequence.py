"""Any number of ranks, any mixture, packed or not, with bad samples or without, from any position: one global sequence."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from elastic_cases import (
    NUM_DOCUMENTS,
    WORLD_SIZES,
    Case,
    Packing,
    Policy,
    Segment,
    Stop,
    check,
    uninterrupted,
    write_documents,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from loaderkit.errors import ConfigError, StageError

NUM_EPOCHS = 3
# Nothing to take from before a change, not a batch for each rank, or nothing that is good to take the place of what is bad.
NO_SUCH_PIPELINE = ("drawn to replace", "is used up", "has a weight above 0", "no batch at all", "is ever")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of tokens, and the index of their lengths."""
    place = tmp_path_factory.mktemp("documents")
    logging.getLogger("loaderkit").setLevel(logging.ERROR)  # a warning for each bad sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADERKIT_CACHE_DIR", str(place / "cache"))
        write_documents(place)
        yield place
    logging.getLogger("loaderkit").setLevel(logging.NOTSET)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num = draw(st.integers(1, 3))
    packing: Packing = draw(st.sampled_from(["none", "none", "direct", "copied"]))
    stop: Stop = draw(st.sampled_from(["first", "all"] if packing != "none" else ["first", "all", "never"]))
    passes = draw(st.lists(st.sampled_from([1, 1, 2, 3, None]), min_size=num, max_size=num))
    if stop != "never" and all(one is None for one in passes):
        passes[0] = 2
    weight = st.sampled_from([0.05, 0.1, 0.3, 0.5, 1.0, 2.5])
    at_change = st.sampled_from([0.0, 0.05, 0.3, 1.0])
    places = sorted(draw(st.sets(st.integers(1, 70), max_size=2)))
    sizes = tuple(draw(st.lists(st.integers(8, 40), min_size=num, max_size=num)))
    policy: Policy = draw(st.sampled_from(["raise", "skip", "replace"] if packing != "direct" else ["raise"]))
    bad: set[int] = set()
    if policy != "raise" and packing == "none":
        bad = {1000 * number + draw(st.integers(0, size - 1)) for number, size in enumerate(sizes) for _ in range(2)}
    if policy != "raise" and packing == "copied":
        bad = draw(st.sets(st.integers(0, sum(NUM_DOCUMENTS[:num]) - 1), max_size=6))
    return Case(
        sizes,
        tuple(draw(st.lists(weight, min_size=num, max_size=num))),
        tuple(passes),
        stop=stop,
        changes=tuple((at, tuple(draw(st.lists(at_change, min_size=num, max_size=num)))) for at in places),
        packing=packing,
        window=draw(st.integers(1, 40)),
        policy=policy,
        bad=frozenset(bad),
        shuffle=draw(st.sampled_from(["global", "global", "none"])),
        drop_last=draw(st.booleans()),
        executor=draw(st.sampled_from(["inline"] * 7 + ["thread"])),
        by=draw(st.sampled_from(["sample", "tokens"] if packing != "none" else ["sample"])),
    )


SEGMENTS = st.lists(
    st.tuples(st.sampled_from(WORLD_SIZES), st.integers(1, 5), st.integers(1, 25)), min_size=2, max_size=4
)


def _check(folder: Path, case: Case, segments: list[Segment]) -> None:
    try:
        epochs = uninterrupted(case, folder, NUM_EPOCHS)
        check(case, folder, segments, epochs)
    except (ConfigError, StageError) as error:
        if not any(words in str(error) for words in NO_SUCH_PIPELINE):
            raise
        assume(False)


# Each example builds up to fifty loaders.
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@given(case=cases(), segments=SEGMENTS)
@FEW
def test_a_drawn_sample(folder: Path, case: Case, segments: list[Segment]) -> None:
    _check(folder, case, segments)


@pytest.mark.prove
@given(case=cases(), segments=SEGMENTS)
@settings(FEW, max_examples=500)
def test_many(folder: Path, case: Case, segments: list[Segment]) -> None:
    _check(folder, case, segments)


# -------------------------------------------------------------------------------------------------------------- the grid

KINDS = {
    "samples": {"packing": "none", "policy": "raise"},
    "samples, skip": {"packing": "none", "policy": "skip"},
    "samples, replace": {"packing": "none", "policy": "replace"},
    "packed": {"packing": "direct", "policy": "raise"},
    "packed, by tokens": {"packing": "direct", "policy": "raise", "by": "tokens"},
    "packed, skip": {"packing": "copied", "policy": "skip"},
    "packed, replace": {"packing": "copied", "policy": "replace"},
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [*product(WORLD_SIZES, WORLD_SIZES)])
def test_every_pair_of_world_sizes(folder: Path, rng: random.Random, kind: str, before: int, after: int) -> None:
    """A source used up, one with two passes, one that begins again, and weights that change; from a random step on."""
    bad = frozenset({3, 1004, 2002} if kind.startswith("samples") else {4, 40})
    case = Case(
        (60, 40, 15),
        (0.6, 0.3, 0.1),
        (1, 2, None),
        changes=((40, (0.2, 0.5, 0.3)),),
        bad=frozenset() if KINDS[kind]["policy"] == "raise" else bad,
        **KINDS[kind],  # type: ignore[arg-type]
    )
    epochs = uninterrupted(case, folder, 2)
    batch_size = rng.randrange(2, 5)
    most = max(1, sum(map(len, epochs)) // (before * batch_size) - 1)
    check(case, folder, [(before, batch_size, rng.randint(1, most)), (after, rng.randrange(2, 5), 1000)], epochs)


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.prove)])
def test_other_executors(folder: Path, rng: random.Random, executor: str) -> None:
    case = Case((50, 30), (0.7, 0.3), (1, 2), packing="direct", executor=executor)
    before, after = rng.sample([1, 2], 2)
    epochs = uninterrupted(case, folder, 2)
    check(case, folder, [(before, 3, rng.randrange(1, 6)), (after, 2, 1000)], epochs)
