"""A new kind of source or stage is a module and a name for it: with that builds, checks and explanations know it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from extensions import forget_after
from numpy.typing import NDArray
from pydantic import Field

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import ConfigError, SourceError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import FieldRange, Sample
from loaderkit.sources.base import ReadContext, Reader, Source, SourceKind
from loaderkit.sources.objects.reader import ItemSource
from loaderkit.stages.base import StageArgs
from loaderkit.stages.context import StageKind

# ------------------------------------------------------------------------------------------ what their modules hold


class SquaresArgs(SourceArgs):
    """The squares of the first numbers."""

    kind: Literal["squares"] = "squares"
    num: int = Field(description="how many")


class Squares(ItemSource):
    """Item i is i * i."""

    def __init__(self, num: int) -> None:
        self.dataset = [{"square": index * index} for index in range(num)]

    def __len__(self) -> int:
        return len(self.dataset)

    def key(self, index: int) -> str:
        return f"{index} squared"

    def origin(self, index: int) -> str:
        return "arithmetic"

    def ranges(self, index: int) -> list[FieldRange]:
        return []

    def constants(self, index: int) -> Sample:
        return {}

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        return np.array([0, len(self)], np.int64)

    def fingerprint(self) -> str:
        return f"squares-{len(self)}"

    def items(self, indices: list[int]) -> list[Any] | None:
        return None

    def sample(self, item: Any) -> Sample:
        return dict(item)

    def columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        return None


def open_squares(args: SquaresArgs, connector: Connector | None) -> Squares:
    return Squares(args.num)


SQUARES = SourceKind(SquaresArgs, open_squares)


class CubesArgs(SourceArgs):
    """The cubes of numbers that are written one behind another, in text."""

    kind: Literal["cubes"] = "cubes"
    text: str = Field(description="the numbers, with spaces between")


class Cubes(Source):
    """Sample i is the cube of number i, read in a way of its own."""

    def __init__(self, text: str) -> None:
        self.words = text.split()

    def __len__(self) -> int:
        return len(self.words)

    def key(self, index: int) -> str:
        return f"{index} cubed"

    def origin(self, index: int) -> str:
        return "a text"

    def reader(self, context: ReadContext) -> Reader:
        return CubesReader(self.words, context)

    def fingerprint(self) -> str:
        return f"cubes-{len(self)}"


class CubesReader(Reader):
    """Counts how often it was closed."""

    closed = 0

    def __init__(self, words: list[str], context: ReadContext) -> None:
        self.words, self.failed = words, context.failed

    def read(self, chunk: SampleChunk) -> int:
        for row, index in enumerate(chunk.source_indices.tolist()):
            try:
                chunk.samples[row] = {"square": int(self.words[index]) ** 3}
            except ValueError as error:
                self.failed(chunk, row, error)
        return len(chunk)

    def close(self) -> None:
        CubesReader.closed += 1


CUBES = SourceKind(CubesArgs, lambda args, connector: Cubes(args.text))


class ShiftArgs(StageArgs):
    """Add a number, and another one at random."""

    by: int = Field(description="what is added")


def shift(args: ShiftArgs) -> Callable[..., None]:
    def run(sample: Sample, draws: NDArray[np.float64], scratch: dict[str, Any] | None) -> None:
        sample["square"] += args.by
        sample["draw"] = float(draws[0])

    return run


SHIFT = StageKind(ShiftArgs, "sample", shift, num_draws=1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch)
    loaderkit.extend.register("squares", SQUARES)
    loaderkit.extend.register("cubes", CUBES)
    loaderkit.extend.register("shift", SHIFT)


PIPELINE: dict[str, Any] = {
    "source": {"kind": "squares", "num": 10},
    "order": {"shuffle": "none", "epochs": 1},
    "stages": ["read", {"shift": {"by": 5}}, {"batch": {"size": 5}}],
}


@pytest.mark.parametrize("executor", ["thread", "inline", "process"])
def test_they_make_batches(executor: str) -> None:
    with loaderkit.build(PIPELINE, overrides={"prefetch.executor": executor}) as loader:
        batches = list(loader)
        again = loader.state_dict()
    numbers = np.concatenate([batch["square"].numpy() for batch in batches])
    assert numbers.tolist() == [index * index + 5 for index in range(10)]
    assert batches[0]["__key__"][3] == "3 squared"
    assert len({float(draw) for batch in batches for draw in batch["draw"]}) == 10
    assert dict(again["fingerprint"])["stages.shift"] == 'shift {"by": 5}'


@pytest.mark.parametrize("executor", ["thread", "inline"])
def test_a_reader_of_ones_own_reads_alone_and_in_a_mixture(executor: str, rng: random.Random) -> None:
    numbers = [rng.randrange(1000) for _ in range(rng.randrange(20, 40))]
    bad = rng.randrange(1, len(numbers))
    words = [str(number) for number in numbers]
    words[bad] = "none"
    alone = {
        **PIPELINE,
        "source": {"kind": "cubes", "text": " ".join(words)},
        "errors": {"on_bad_sample": "skip"},
        "prefetch": {"executor": executor},
    }
    closed = CubesReader.closed
    with loaderkit.build(alone) as loader:
        found = {
            key: int(cube) for batch in loader for key, cube in zip(batch["__key__"], batch["square"], strict=True)
        }
        assert next(row for row in loader.stats().stages if row.kind == "read").num_failed == 1
    assert found == {f"{i} cubed": numbers[i] ** 3 + 5 for i in range(len(numbers)) if i != bad}
    assert CubesReader.closed > closed

    squares = {"name": "one", "kind": "squares", "num": len(numbers)}
    cubes = {"name": "other", "kind": "cubes", "text": " ".join(map(str, numbers))}
    mixed = {
        **{key: value for key, value in alone.items() if key != "source"},
        "sources": [squares, cubes],
        "mix": {"stop": "all"},
        "order": {"shuffle": "global", "seed": rng.randrange(100), "epochs": 1},
    }
    with loaderkit.build(mixed) as loader:
        found = {
            (source, key): int(value)
            for batch in loader
            for source, key, value in zip(batch["__source__"].tolist(), batch["__key__"], batch["square"], strict=True)
        }
    expected = {(0, f"{i} squared"): i * i + 5 for i in range(len(numbers))}
    assert found == expected | {(1, f"{i} cubed"): number**3 + 5 for i, number in enumerate(numbers)}


def test_block_order_is_refused_where_a_source_has_no_blocks() -> None:
    blocks = {**PIPELINE, "source": {"kind": "cubes", "text": "1 2 3 4 5"}, "order": {"shuffle": "block"}}
    with pytest.raises(SourceError, match=r"order\.shuffle: block"):
        loaderkit.build(blocks)


def test_they_are_checked() -> None:
    stages = ["read", {"batch": {"size": 5}}, {"shift": {"by": 1}}]
    with pytest.raises(ConfigError, match="`shift` acts on single samples: put it before `batch`"):
        loaderkit.build({**PIPELINE, "stages": stages})
    with pytest.raises(ConfigError, match="'num' is missing: how many"):
        loaderkit.build({**PIPELINE, "source": {"kind": "squares"}})


def test_the_command_line_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "squares.yaml"
    path.write_text(
        "source: {kind: squares, num: 10}\norder: {shuffle: none}\n"
        "stages:\n- read\n- shift: {by: 5}\n- batch: {size: 5}\n"
    )
    assert main(["check", str(path)]) == 0
    assert "square: int64" in capsys.readouterr().out
    assert main(["explain", str(path)]) == 0
    explained = capsys.readouterr().out
    assert "read > shift > batch" in explained


def test_they_are_methods_of_pipelines() -> None:
    begun: Any = Pipeline.squares(10)  # type: ignore[attr-defined]
    pipeline = begun.shuffle(False).epochs(1).read().shift(5).batch(5)
    assert pipeline == Pipeline(PIPELINE)
    assert "shift" in pipeline.to_yaml()


def test_a_new_stage_may_wait_for_anything_unless_it_says_that_it_only_computes() -> None:
    """What the GIL's holders are charged with for a stage does not hold for one that asks a server."""
    loaderkit.extend.register("pure_shift", StageKind(ShiftArgs, "sample", shift, num_draws=1, only_computes=True))
    stages = ["read", {"shift": {"by": 5}}, {"pure_shift": {"by": 5}}, {"batch": {"size": 5}}]
    with loaderkit.build(PIPELINE | {"stages": stages}, overrides={"prefetch.executor": "thread"}) as loader:
        assert len([*loader]) == 2
        assert [(row.kind, row.waits) for row in loader.stats().stages] == [
            ("read", True),
            ("shift", True),
            ("pure_shift", False),
            ("batch", False),
        ]
