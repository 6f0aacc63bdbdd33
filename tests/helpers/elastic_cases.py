"""Pipelines of several sources, packed or not, with bad samples or without; what a run of some ranks delivers by position, and
what it has to deliver, by the uninterrupted run of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from token_files import write_megatron

import loaderkit
from loaderkit.cli import main
from loaderkit.errors import StageError

Row = tuple[Any, ...]
Segment = tuple[int, int, int]
"""(number of ranks, batch size, steps)."""
Stop = Literal["first", "all", "never"]
Packing = Literal["none", "direct", "copied"]
Policy = Literal["raise", "skip", "replace"]
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)
NUM_DOCUMENTS = (30, 18, 9)
LENGTH = 32  # tokens of a sequence
MOST_ROWS = 400  # that are looked at where an epoch does not end
SEED = 3
_bad: frozenset[int] = frozenset()  # documents that cannot be read now


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A stage whose result depends on the random numbers of its sample."""
    return {"x": sample["x"], "noise": int(rng.integers(1 << 40))}


def fails_if_bad(sample: dict[str, Any]) -> None:
    """A stage on documents that fails for some."""
    if document_of(int(sample["tokens"][0])) in _bad:
        raise ValueError("a bad document")


def document_of(token: int) -> int:
    """Token i of document d is 1000 d + i + 1."""
    return (token - 1) // 1000


def write_documents(folder: Path) -> None:
    """A file of tokens for each of three sources, and the lengths that `pack` needs behind a stage."""
    rng = np.random.default_rng(5)
    for number, num in enumerate(NUM_DOCUMENTS):
        first = sum(NUM_DOCUMENTS[:number])
        documents = [
            (1000 * (first + place) + 1 + np.arange(length)).astype("int32")
            for place, length in enumerate(np.maximum(1, rng.lognormal(2.7, 0.9, num).astype(int)).tolist())
        ]
        write_megatron(folder / f"{number}", documents, "int32")
    for num in range(1, len(NUM_DOCUMENTS) + 1):
        case = Case((0,) * num, (1.0,) * num, (1,) * num, packing="copied")
        path = folder / f"{num}.yaml"
        path.write_text(json.dumps(case.pipeline(folder, 1)))
        assert main(["index", "--lengths", str(path)]) == 0


@dataclass(frozen=True)
class Case:
    """Sources of these sizes (packed: files of documents, whatever the sizes)."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    passes: tuple[int | None, ...]  # None: repeat
    stop: Stop = "all"
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    packing: Packing = "none"  # how tokens come into their places
    window: int = 20
    policy: Policy = "raise"
    bad: frozenset[int] = frozenset()  # samples, or documents of files
    shuffle: str = "global"
    drop_last: bool = False
    executor: str = "inline"
    by: Literal["sample", "tokens"] = "sample"

    def pipeline(self, folder: Path, batch_size: int, *, all_good: bool = False) -> dict[str, Any]:
        names = [f"s{number}" for number in range(len(self.sizes))]
        sources: list[dict[str, Any]] = []
        for number, (name, weight, passes) in enumerate(zip(names, self.weights, self.passes, strict=True)):
            if self.packing == "none":
                bad = [] if all_good else [x % 1000 for x in self.bad if x // 1000 == number]
                args = {"size": self.sizes[number], "begin": 1000 * number, "bad": bad}
                source: dict[str, Any] = {"kind": "dataset", "object": "mixtures:Counted", "args": args}
            else:
                source = {"kind": "tokens", "url": str(folder / f"{number}.bin")}
            how_often = {"repeat": True} if passes is None else {"epochs": passes}
            how_often = {} if self.stop == "never" else how_often
            sources.append({"name": name, "weight": weight, **how_often, **source})
        changes = [{"at": at, "weights": dict(zip(names, row, strict=True))} for at, row in self.changes]
        stages: list[Any] = ["read"]
        if self.packing == "none":
            stages.append({"call": {"function": "elastic_cases:noisy"}})
        if self.packing == "copied":
            stages.append({"call": {"function": "elastic_cases:fails_if_bad"}})
        if self.packing != "none":
            stages.append({"pack": {"length": LENGTH, "window": self.window}})
        return {
            "sources": sources,
            "mix": {"by": self.by, "stop": self.stop, "changes": changes},
            "order": {"shuffle": self.shuffle, "seed": SEED},
            "errors": {"on_bad_sample": self.policy},
            "stages": [*stages, {"batch": {"size": batch_size, "drop_last": self.drop_last}}],
            "prefetch": {"executor": self.executor},
        }

    def spoil(self, *, all_good: bool = False) -> None:
        """Make its documents bad, for loaders of this process."""
        global _bad  # noqa: PLW0603 - a stage is a plain function
        _bad = frozenset() if all_good else self.bad

    def rows_of(self, batch: dict[str, Any]) -> list[Row]:
        """The rows that are no repeats."""
        names = ("x", "noise", "__source__") if self.packing == "none" else ("input_ids", "document_ids")
        columns = [batch[name].tolist() for name in names]
        rows = [(*map(_plain, row), key) for *row, key in zip(*columns, batch["__key__"], strict=True)]
        wrapped = batch["__wrapped__"].tolist() if "__wrapped__" in batch else [False] * len(rows)
        return [row for row, is_repeated in zip(rows, wrapped, strict=True) if not is_repeated]

    def without_bad(self, row: Row) -> Row | None:
        """What `skip` leaves of a row; None: nothing."""
        if self.packing == "none":
            return None if row[0] in self.bad else row
        tokens, documents, key = row
        is_bad = [token > 0 and document_of(token) in self.bad for token in tokens]
        if all(bad or token == 0 for bad, token in zip(is_bad, tokens, strict=True)):
            return None
        return (
            tuple(0 if bad else token for bad, token in zip(is_bad, tokens, strict=True)),
            tuple(-1 if bad else document for bad, document in zip(is_bad, documents, strict=True)),
            key,
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def uninterrupted(case: Case, folder: Path, num_epochs: int) -> list[list[Row | None]]:
    """The rows of some epochs by position, as one rank gets them in batches of 7; None: a bad sample that is left out.

    With `skip` they are those of a run without bad samples, less the bad ones.
    """
    is_skipping = case.policy == "skip"
    case.spoil(all_good=is_skipping)
    whole = replace(case, drop_last=False, executor="inline").pipeline(folder, 7, all_good=is_skipping)
    epochs: list[list[Row | None]] = []
    with loaderkit.build(whole, rank=0, world_size=1) as loader:
        for _ in range(num_epochs if case.stop != "never" else 1):
            rows: list[Row] = []
            for batch in loader:
                rows += case.rows_of(batch)
                if case.stop == "never" and len(rows) >= MOST_ROWS:
                    break
            epochs.append([case.without_bad(row) for row in rows] if is_skipping else list(rows))
    return epochs


def check(case: Case, folder: Path, segments: Sequence[Segment], epochs: list[list[Row | None]]) -> None:
    """Train through the segments, each resumed from the state of the one before: every batch of every rank has to be the one
    that the uninterrupted order and the plainest arithmetic say."""
    case.spoil()
    state: dict[str, Any] | None = None
    epoch = position = 0
    for world_size, batch_size, num_steps in segments:
        if epoch == len(epochs):
            return
        described = case.pipeline(folder, batch_size)
        loaders = [loaderkit.build(described, rank=rank, world_size=world_size) for rank in range(world_size)]
        try:
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            batches = [_endless(loader) for loader in loaders]
            for _ in range(num_steps):
                while not _num_steps(case, len(epochs[epoch]) - position, world_size, batch_size):
                    epoch, position = epoch + 1, 0
                    if epoch == len(epochs):
                        return
                if case.stop == "never" and position + world_size * batch_size > len(epochs[0]):
                    return
                end = min(position + world_size * batch_size, len(epochs[epoch]))
                for rank, iterator in enumerate(batches):
                    mine = [epochs[epoch][place] for place in range(position, end) if place % world_size == rank]
                    expected = [row for row in mine if row is not None]
                    try:
                        found = case.rows_of(next(iterator))
                    except StageError as error:
                        if expected or "were bad, so nothing is left" not in str(error):
                            raise
                        return
                    assert found == expected, (world_size, batch_size, rank, epoch, position)
                position = end
            if not _num_steps(case, len(epochs[epoch]) - position, world_size, batch_size):
                epoch, position = epoch + 1, 0  # for these ranks: with `drop_last` others could go on
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            assert all(one == states[0] for one in states)
            state = states[0]
        finally:
            for loader in loaders:
                loader.close()


def _num_steps(case: Case, left: int, world_size: int, batch_size: int) -> int:
    if case.drop_last:
        return left // (world_size * batch_size)
    return -(-left // (world_size * batch_size))


def _endless(loader: loaderkit.Loader) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader
