"""Kinds of other packages are held to what they give, and are not taken for ours by a name."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from extensions import forget_after
from pydantic import Field, create_model

import loaderkit
from loaderkit.errors import ConfigError, SourceError, StageError, StateError
from loaderkit.extend import (
    ReadContext,
    Reader,
    SampleChunk,
    SampleReader,
    Source,
    SourceArgs,
    SourceKind,
    StageArgs,
    StageKind,
    register,
)
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.fingerprint import arguments_of
from loaderkit.pipeline.lengths import measure_lengths

OURS = ("timeout", "thread_safe", "max_pixels", "formats", "device", "regions", "on_gpu_error", "on_empty_batch")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch)


# ------------------------------------------------------------------------------------------------- their arguments


def unchanged(args: StageArgs) -> Callable[..., None]:
    def run(sample: dict[str, Any], draws: Any, scratch: Any = None) -> None:
        del sample, draws

    return run


def described(stage: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "dataset", "object": [{"x": number} for number in range(6)]},
        "stages": ["read", stage, {"batch": {"size": 2}}],
        "order": {"epochs": 1},
        "prefetch": {"executor": "inline"},
    }


def state_of(stage: Any) -> Any:
    with loaderkit.build(described(stage)) as loader:
        return json.loads(json.dumps(loader.state_dict()))


def is_accepted(state: Any, stage: Any) -> bool:
    with loaderkit.build(described(stage)) as loader:
        try:
            loader.load_state_dict(state)
        except StateError as error:
            return "stages.odd" not in str(error)
        return True


def register_odd(**fields: Any) -> None:
    args = create_model("OddArgs", __base__=StageArgs, __doc__="Odd.", **fields)
    register("odd", StageKind(args, "sample", make=unchanged))


@pytest.mark.parametrize("name", OURS)
def test_an_argument_named_like_one_of_ours_counts(name: str, rng: random.Random) -> None:
    register_odd(**{name: (int, 0)})
    values = rng.sample(range(9), 3)
    states = {value: state_of({"odd": {name: value}}) for value in values}
    for value in values:
        assert [one for one in values if is_accepted(states[one], {"odd": {name: value}})] == [value]
    assert is_accepted(states[values[0]], {"odd": {name: values[0], "workers": 2}})
    stages = [parse(described({"odd": {name: value}})).stages[1] for value in values]
    told = [json.dumps(arguments_of(stage, of="lengths")) for stage in stages]
    assert len(set(told)) == len(values)


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, lambda x: {"of": np.array(x)}], ids=["array", "tensor", "dict"]
)
@pytest.mark.parametrize("default", [None, "array"])
def test_arrays_are_arguments(make: Callable[[Any], Any], default: Any, rng: random.Random) -> None:
    one = [rng.randint(0, 9) for _ in range(rng.randint(2, 6))]
    other = [*one[:-1], one[-1] + 1]
    register_odd(table=(Any, None if default is None else make(one)))
    state = state_of({"odd": {"table": make(one)}})
    assert is_accepted(state, {"odd": {"table": make(one)}})
    assert not is_accepted(state, {"odd": {"table": make(other)}})
    assert not is_accepted(state, {"odd": {"table": make([one])}})
    if default is not None and not isinstance(make(one), dict):
        assert is_accepted(state, "odd"), "it is at its default"


# ------------------------------------------------------------------------------------------------- their sources


class NumbersArgs(SourceArgs):
    """The first numbers."""

    num: int = Field(description="how many")


class Numbers(Source):
    """Sample i is the number i."""

    make_reader: Callable[[ReadContext], Reader]

    def __init__(self, args: NumbersArgs, connector: None = None) -> None:
        self.num = args.num

    def __len__(self) -> int:
        return self.num

    def key(self, index: int) -> str:
        return f"number {index}"

    def origin(self, index: int) -> str:
        return "numbers"

    def fingerprint(self) -> str:
        return f"numbers {self.num}"

    def reader(self, context: ReadContext) -> Reader:
        return type(self).make_reader(context)


class InTurn(Reader):
    """Every `bad_each`-th sample is bad. Notes what it is called with, and whether another thread was in it."""

    in_turn = True

    def __init__(self, context: ReadContext, bad_each: int) -> None:
        self.failed, self.bad_each = context.failed, bad_each
        self.firsts: list[int] = []
        self.overlaps = 0
        self.inside = threading.Lock()
        self.another = threading.Event()

    def read(self, chunk: SampleChunk) -> int:
        if not self.inside.acquire(blocking=False):
            self.overlaps += 1
            self.another.set()
            return 0
        try:
            self.another.wait(0.002)  # for another thread to come in, which none should
            self.firsts.append(int(chunk.source_indices[0]))
            for row, index in enumerate(chunk.source_indices.tolist()):
                if self.bad_each and index % self.bad_each == 1:
                    self.failed(chunk, row, ValueError("bad"))
                else:
                    chunk.samples[row] = {"x": np.full(index % 3 + 1, index)}
        finally:
            self.inside.release()
        return 0


def register_in_turn(bad_each: int = 0) -> list[InTurn]:
    made: list[InTurn] = []

    def make_reader(context: ReadContext) -> Reader:
        made.append(InTurn(context, bad_each))
        return made[-1]

    source = type("InTurnNumbers", (Numbers,), {"make_reader": staticmethod(make_reader)})
    register("numbers", SourceKind(NumbersArgs, source, has_blocks=False))
    return made


def in_turn_pipeline(num: int, **more: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "numbers", "num": num},
        "stages": ["read", {"batch": {"size": 4, "ragged": {"x": "pad"}}}],
        "order": {"epochs": 1, "shuffle": "none"},
        **more,
    }


def test_an_order_in_blocks_is_refused_by_the_name_of_the_kind() -> None:
    register_in_turn()
    with pytest.raises(
        ConfigError, match=r"block needs a source .*, and a source of kind 'numbers' does not: use global"
    ):
        loaderkit.build(in_turn_pipeline(8, order={"shuffle": "block"}))


def firsts_of(readers: Sequence[InTurn]) -> list[int]:
    """What the one reader that was used was called with."""
    assert not any(reader.overlaps for reader in readers)
    (used,) = [reader.firsts for reader in readers if reader.firsts]
    return used


def test_lengths_are_measured_by_one_thread_of_what_is_read_in_turn(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaderkit.pipeline.lengths.num_cpus", lambda: 4)
    made = register_in_turn()
    num = rng.randint(300, 700)
    config = parse(in_turn_pipeline(num))
    plan = compile_pipeline(config, rank=0, world_size=1)
    batch = config.stage("batch")
    wanted = replace(batch, args=batch.args.model_copy(update={"field": "x"}))
    measured = measure_lengths(plan.source, plan.compiled.stages, wanted, config.prefetch, raises=True)
    with closing(measured):
        lengths = np.concatenate([some for some, _ in measured])
    plan.close()
    assert lengths.tolist() == [index % 3 + 1 for index in range(num)]
    assert firsts_of(made) == [*range(0, num, 64)]


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_what_is_read_in_turn_skips_bad_samples_and_replaces_none(executor: str, rng: random.Random) -> None:
    bad_each, num = rng.randint(3, 7), rng.randint(30, 60)
    made = register_in_turn(bad_each)
    prefetch = {"executor": executor, **({"concurrency": 4} if executor == "thread" else {})}
    skipping = in_turn_pipeline(num, prefetch=prefetch, errors={"on_bad_sample": "skip"})
    with loaderkit.build(skipping) as loader:
        found = [int(x[0]) for batch in loader for x in batch["x"]]
    assert found == [index for index in range(num) if index % bad_each != 1]
    (reader,) = made
    assert not reader.overlaps
    assert reader.firsts[1:] == sorted(reader.firsts[1:]), "after the first one, which shows what a batch holds"
    with pytest.raises(ConfigError, match=r"errors\.on_bad_sample: this source is read in order"):
        loaderkit.build({**skipping, "errors": {"on_bad_sample": "replace"}})


def test_two_sources_that_are_read_in_turn_are_mixed_and_resumed(rng: random.Random) -> None:
    made = register_in_turn()
    sources = [{"name": name, "kind": "numbers", "num": rng.randint(40, 60), "weight": 1.0} for name in ("a", "b")]
    described = in_turn_pipeline(1, prefetch={"executor": "thread", "concurrency": 3})
    del described["source"]
    described |= {"sources": sources, "mix": {"stop": "all"}}

    def values(batches: Any) -> list[Any]:
        return [batch["x"].tolist() for batch in batches]

    with loaderkit.build(described) as loader:
        whole = values(loader)
    with loaderkit.build(described) as loader:
        batches = iter(loader)
        seen = values(next(batches) for _ in range(rng.randint(1, 5)))
        state = loader.state_dict()
        next(batches)
        loader.load_state_dict(state)
        assert seen + values(loader) == whole
    assert not any(reader.overlaps for reader in made)


def with_blocks(bounds: Any) -> dict[str, Any]:
    members = {
        "make_reader": staticmethod(lambda context: InTurn(context, 0)),
        "blocks": lambda self, num_bytes: bounds,
    }
    register("cut", SourceKind(NumbersArgs, type("Cut", (Numbers,), members)))
    return in_turn_pipeline(50, order={"shuffle": "block", "epochs": 1}, source={"kind": "cut", "num": 50})


def drawn_bounds(rng: random.Random) -> list[int]:
    return [0, *sorted(rng.sample(range(1, 50), rng.randint(3, 6))), 50]


@pytest.mark.parametrize("make", [list, np.array, lambda bounds: np.array(bounds, np.int32)], ids=["list", "64", "32"])
def test_blocks_hold_each_sample_once(make: Callable[[list[int]], Any], rng: random.Random) -> None:
    with loaderkit.build(with_blocks(make(drawn_bounds(rng)))) as loader:
        assert sorted(int(x[0]) for batch in loader for x in batch["x"]) == [*range(50)]


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda bounds: bounds[:-1],
        lambda bounds: bounds[1:],
        lambda bounds: [*bounds, 51],
        lambda bounds: [0, bounds[2], bounds[1], *bounds[3:]],
        lambda bounds: [-1, *bounds],
        lambda bounds: [],
        lambda bounds: None,
        lambda bounds: [float(bound) for bound in bounds],
        lambda bounds: [bounds],
    ],
    ids=["short", "late", "long", "unsorted", "negative", "none", "nothing", "float", "nested"],
)
def test_blocks_that_lose_samples_are_refused(spoilt: Callable[[list[int]], Any], rng: random.Random) -> None:
    with pytest.raises(SourceError, match=r"`blocks` of kind: cut gives .* for 50 samples"):
        loaderkit.build(with_blocks(np.array(spoilt(drawn_bounds(rng)))))


# ------------------------------------------------------------------------------------------------- what they return


@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize("wrong", [None, 7, [("x", 1)], (1, 2)], ids=str)
def test_a_source_that_gives_no_sample(wrong: Any, executor: str, rng: random.Random) -> None:
    bad = rng.sample(range(20), 3)

    def make_reader(context: ReadContext) -> Reader:
        return SampleReader(lambda index: wrong if index in bad else {"x": np.array([index])}, context)

    source = type("Gaps", (Numbers,), {"make_reader": staticmethod(make_reader)})
    register("numbers", SourceKind(NumbersArgs, source, has_blocks=False))
    skipping = in_turn_pipeline(20, prefetch={"executor": executor}, errors={"on_bad_sample": "skip"})
    with loaderkit.build(skipping) as loader:
        assert [int(x) for batch in loader for x in batch["x"]] == [index for index in range(20) if index not in bad]
    what = "None" if wrong is None else f"a value of type {type(wrong).__name__}"
    message = rf"^read failed for sample 'number {min(bad)}' in numbers: .*the source gave {what} for it"
    with pytest.raises(StageError, match=message), loaderkit.build({**skipping, "errors": {}}) as loader:
        list(loader)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(lambda sample: sample, "dict"), (lambda sample: {}, "dict"), (list, "list"), (id, "int")],
    ids=["the sample", "empty", "names", "number"],
)
def test_a_stage_that_returns_something(wrong: Callable[[Any], Any], named: str, rng: random.Random) -> None:
    bad = rng.sample(range(6), 2)

    def make(args: StageArgs) -> Callable[..., Any]:
        return lambda sample, draws, scratch=None: wrong(sample) if sample["x"] in bad else None

    register("odd", StageKind(create_model("OddArgs", __base__=StageArgs, __doc__="Odd."), "sample", make=make))
    one_by_one = {**described("odd"), "order": {"epochs": 1, "shuffle": "none"}}
    with loaderkit.build({**one_by_one, "errors": {"on_bad_sample": "skip"}}) as loader:
        assert [x for batch in loader for x in batch["x"].tolist()] == [x for x in range(6) if x not in bad]
    message = rf"^odd failed for sample '{min(bad)}' in .*its function returned a value of type {named}: it changes"
    with pytest.raises(StageError, match=message), loaderkit.build(one_by_one) as loader:
        list(loader)


def test_a_batch_stage_that_returns_another_batch_is_refused() -> None:
    """Its fields would be lost."""

    def compiled(stage: Any, context: Any) -> Any:
        return stage.ready("batch", lambda batch, where: {**batch, "y": 1})

    args = create_model("OddArgs", __base__=StageArgs, __doc__="Odd.")
    register("odd", StageKind(args, "batch", compile=compiled))
    pipeline = {**described("odd"), "stages": ["read", {"batch": {"size": 2}}, "odd"]}
    message = r"^odd failed for batch 0 .*a value of type dict: it changes the batch in place, and returns nothing"
    with pytest.raises(StageError, match=message), loaderkit.build(pipeline) as loader:
        list(loader)


class KeepsArgs(SourceArgs):
    """Samples that the source keeps."""


class Keeps(Numbers):
    """Gives the same array and the same list each time."""

    def __init__(self, args: KeepsArgs, connector: Any) -> None:
        self.num = 8
        self.samples: list[dict[str, Any]] = [{"x": np.array([number]), "seen": []} for number in range(self.num)]

    def reader(self, context: ReadContext) -> Reader:
        return SampleReader(lambda index: dict(self.samples[index]), context)


def changes(sample: dict[str, Any]) -> None:
    sample["x"] += 100
    sample["seen"].append(1)


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_function_changes_nothing_that_a_source_keeps(executor: str, is_mixed: bool) -> None:
    register("keeps", SourceKind(KeepsArgs, Keeps, has_blocks=False))
    stages = ["read", {"call": {"function": changes}}, {"batch": {"size": 4}}]
    pipeline: dict[str, Any] = {"stages": stages, "prefetch": {"executor": executor}}
    if is_mixed:
        pipeline["sources"] = [{"name": name, "kind": "keeps", "weight": 1} for name in "ab"]
    else:
        pipeline["source"] = {"kind": "keeps"}
    with loaderkit.build(pipeline) as loader:
        for _ in range(2):
            batches = list(loader)
            found = sorted(x for batch in batches for x in batch["x"].flatten().tolist())
            assert {*found} == {*range(100, 108)}
            assert all(seen == [1] for batch in batches for seen in batch["seen"])
