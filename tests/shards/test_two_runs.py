"""Two runs at one place, whose operations on the store come in any order: what is there in the end is that of one of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buckets import upload
from interleaved import InTurns, Turns
from packed_shards import files_in, packed
from seaweed import Seaweed

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import StoreArgs
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.file_writes import FileWriter
from loaderkit.connectors.s3.writes import S3Writer
from loaderkit.errors import ConfigError, LoaderkitError, SourceError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards import state
from loaderkit.shards.job import Destination
from loaderkit.shards.planning import Options, ShardPlan, plan_shards
from loaderkit.shards.run import Workers, pack_shards

SIZE = 60


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def numbers(seed: int) -> Pipeline:
    """Shards of any order are of equal sizes, so that sizes tell nothing."""
    return (
        Pipeline.dataset([{"x": number} for number in range(10, 10 + SIZE)])
        .shuffle("global", seed=seed)
        .read()
        .batch(7)
    )


@contextmanager
def planned(pipeline: Pipeline, out: Path | str, options: dict[str, Any]) -> Iterator[ShardPlan]:
    plan = plan_shards(to_config(pipeline), Options(str(out), **options))
    with closing(plan.job.plan):
        yield plan


def options_of(form: str) -> dict[str, Any]:
    return {"format": form, "shard_bytes": 10_240 if form == "tar" else 80}


def read(out: Path, form: str) -> list[int]:
    """All numbers that training gets, sorted. Raises SourceError if it refuses."""
    if form == "array":
        return sorted(np.load(out / "x.npy").tolist())
    source = {"kind": "tar", "url": str(out), "fields": {"x": "x.cls"}}
    with loaderkit.build({"source": source, "stages": ["read", "decode", {"batch": {"size": 7}}]}) as loader:
        return sorted(int(number) for batch in loader for number in batch["x"])


@pytest.mark.parametrize("num", [6, pytest.param(400, marks=pytest.mark.prove)])
@pytest.mark.parametrize("form", ["tar", "array"])
def test_any_order_of_two_runs_leaves_the_shards_of_one(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, form: str, num: int
) -> None:
    """With settings that are equal or not; the second begins with removing what the first has written, or not."""
    options, expected = options_of(form), {}
    for seed in (1, 2):
        packed(numbers(seed), tmp_path / f"expected{seed}", **options)
        expected[seed] = files_in(tmp_path / f"expected{seed}")
    assert {name: len(data) for name, data in expected[1].items() if name.endswith((".tar", ".npy"))} == {
        name: len(data) for name, data in expected[2].items() if name.endswith((".tar", ".npy"))
    }
    for number in range(num):
        out, seeds = tmp_path / f"out{number}", (1, rng.choice([1, 2, 2]))
        turns = Turns(rng)
        with monkeypatch.context() as patch:
            patch.setattr(Destination, "open", opening_in_turns(turns))
            ends = run_both(out, seeds, options, turns, removes=rng.random() < 0.3)
        for error in ends.values():
            assert error is None or isinstance(error, LoaderkitError), repr(error)
        refused = read_or_refused(out, form)
        if refused is None:
            assert files_in(out) in expected.values(), (number, ends)
        else:
            finish(out, seeds, options)
        assert read(out, form) == [*range(10, 10 + SIZE)]
        assert files_in(out) in (expected[seeds[0]], expected[seeds[1]])


def opening_in_turns(turns: Turns) -> Callable[[Destination], Connector]:
    opened = Destination.open
    return lambda destination: InTurns(opened(destination), turns)


def run_both(
    out: Path, seeds: tuple[int, int], options: dict[str, Any], turns: Turns, *, removes: bool
) -> dict[str, BaseException | None]:
    """What each of two runs has raised; the second `removes` what is there before it begins."""
    with planned(numbers(seeds[0]), out, options) as first, planned(numbers(seeds[1]), out, options) as second:

        def pack_first() -> None:
            pack_shards(first, Workers(1), lambda progress: None)

        def pack_second() -> None:
            if removes:
                shutil.rmtree(out, ignore_errors=True)
            pack_shards(second, Workers(1), lambda progress: None)

        return turns.run({"first": pack_first, "second": pack_second})


def read_or_refused(out: Path, form: str) -> str | None:
    """Why training refuses what is there; None if it gets all of it, once."""
    if form == "array" and not (out / "loaderkit-shards.json").exists():
        return "unfinished"
    try:
        assert read(out, form) == [*range(10, 10 + SIZE)]
    except SourceError as error:
        return str(error)
    return None


def finish(out: Path, seeds: tuple[int, int], options: dict[str, Any]) -> None:
    """What a user does who is told that something else is there."""
    for seed in seeds:
        try:
            packed(numbers(seed), out, **options)
            return
        except ConfigError as error:
            said = str(error)
    raise AssertionError(said)


@pytest.mark.parametrize("seed", [1, 2])
def test_one_that_begins_late_leaves_what_another_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It had looked at the place before there was anything."""
    out, options, own = tmp_path / "out", options_of("tar"), state.own

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(state, "own", own)
        packed(numbers(seed), out, **options)
        return own(*arguments)

    monkeypatch.setattr(state, "own", late)
    with pytest.raises(LoaderkitError, match=r"another `loaderkit pack` has finished in .*out/ just now"):
        packed(numbers(1), out, **options)
    packed(numbers(seed), tmp_path / "expected", **options)
    assert files_in(out) == files_in(tmp_path / "expected")
    assert read_or_refused(out, "tar") is None


class TestWhatIsInFlight:
    """A shard whose run has looked at the plan for the last time when another run begins."""

    def test_a_file_does_not_appear(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overtaken(str(tmp_path / "out"), FileWriter, FileConnector(tmp_path / "out"), monkeypatch)
        assert {path.name for path in (tmp_path / "out").rglob("*")} == {".loaderkit-shards", "plan.json"}

    def test_an_object_does_not_appear(
        self, seaweed: Seaweed, photos: Path, s3_keys: None, rng: random.Random, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        upload(seaweed, photos, "packing", "photos/")
        monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
        place = f"in-flight-{rng.randrange(2**32)}"
        with closing(Destination(f"s3://packing/{place}", StoreArgs()).open()) as connector:
            self.overtaken(f"s3://packing/{place}", S3Writer, connector, monkeypatch)
            assert [info.key for info in connector.list("")] == [".loaderkit-shards/plan.json"]

    def overtaken(self, out: str, writer: Any, connector: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
        options = options_of("tar")
        commit, calls = writer.commit, []

        def late(self: Any) -> Any:
            if self._key.endswith(".tar"):  # the first that is not the plan
                calls.append(self._key)
                with planned(numbers(2), out, options) as plan:
                    state.own(connector, plan.job, plan.fingerprint)
            return commit(self)

        monkeypatch.setattr(writer, "commit", late)
        with pytest.raises(LoaderkitError, match=r"shard 0 of 6: another `loaderkit pack` is at work"):
            packed(numbers(1), out, **options)
        assert calls == ["shard-000000.tar"]
