"""The promises of every source, whatever its samples are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from loaderkit._internal.packing import pack, unpack
from loaderkit.connectors.base import Connector
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.config.registry import SOURCES
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.sources.base import Source
from loaderkit.testing.runs import EXECUTORS, IN_PROCESSES, assert_resumes, assert_same, epochs_of

Opened = tuple[Source, Connector | None]


class SourceContract:
    """A subclass gives the fixture `described`: the `source` of a pipeline, a mapping with `kind`, over `num_samples` samples
    that it has made; and `stages`, if the samples need more than `read` to make batches of 4."""

    num_samples: int = 60
    stages: tuple[Any, ...] = ()

    @pytest.fixture
    def described(self) -> Mapping[str, Any]:
        """To be given."""
        raise NotImplementedError(f"{type(self).__name__} gives the fixture described: see SourceContract")

    @pytest.fixture
    def open_source(self, described: Mapping[str, Any]) -> Iterator[Callable[..., Opened]]:
        """Opens the source; keyword arguments go into its description."""
        with _opening(described) as open_it:
            yield open_it

    def pipeline(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """A pipeline over the source."""
        return {"source": {**described}, "stages": ["read", *self.stages, {"batch": {"size": 4}}], "order": {"seed": 3}}

    # ------------------------------------------------------------------------------------------------- the samples

    def test_numbered_keyed_and_the_same_every_time(self, open_source: Callable[..., Opened]) -> None:
        (one, _), (other, _) = open_source(), open_source()
        assert len(one) == self.num_samples
        keys = [one.key(index) for index in range(len(one))]
        assert len(set(keys)) == len(one)
        assert keys == [other.key(index) for index in range(len(one))]
        assert one.fingerprint() == other.fingerprint()
        assert all(one.origin(index) for index in range(len(one)))

    def test_limit_is_the_beginning_of_the_canonical_order(self, open_source: Callable[..., Opened]) -> None:
        (whole, _), (part, _) = open_source(), open_source(limit=7)
        assert len(part) == 7
        assert [part.key(index) for index in range(7)] == [whole.key(index) for index in range(7)]
        assert part.classes == whole.classes
        assert part.fingerprint() != whole.fingerprint()
        assert len(open_source(limit=1000)[0]) == self.num_samples

    def test_blocks_cut_everything_once(self, described: Mapping[str, Any], open_source: Callable[..., Opened]) -> None:
        if not SOURCES[described["kind"]].has_blocks:
            with pytest.raises(ConfigError, match="block"):
                parse({**self.pipeline(described), "order": {"shuffle": "block"}})
            return
        source, _ = open_source()
        for block_bytes in (1, 5000, 10**9):
            bounds = np.asarray(source.blocks(block_bytes))
            assert (bounds[0], bounds[-1]) == (0, len(source))
            assert (bounds[1:] > bounds[:-1]).all()

    def test_ranges_are_what_the_connector_holds(self, open_source: Callable[..., Opened]) -> None:
        source, connector = open_source()
        if not source.has_ranges:
            pytest.skip("samples of this source are no byte ranges of their own")
        assert connector is not None, "byte ranges are those of objects in a store: the kind has a `root`"
        for index in (0, len(source) // 2, len(source) - 1):
            for field in source.ranges(index):
                data = bytearray(field.range.length)
                connector.read_into(field.range.key, field.range.start, memoryview(data), etag=field.range.etag)

    def test_constants_are_fresh(self, open_source: Callable[..., Opened]) -> None:
        source, _ = open_source()
        for index in (0, len(source) - 1):
            source.constants(index)["mine"] = 1
            assert "mine" not in source.constants(index)

    # ------------------------------------------------------------------------------------------------- in pipelines

    def test_the_same_bytes_whoever_runs_it(self, described: Mapping[str, Any]) -> None:
        expected = epochs_of(self.pipeline(described), EXECUTORS[0], 2)
        keys = [key for batch in expected[: len(expected) // 2] for key in batch["__key__"]]
        assert len(keys) == len(set(keys)) == self.num_samples
        for prefetch in EXECUTORS[1:]:
            assert_same(epochs_of(self.pipeline(described), prefetch, 2), expected, f"{prefetch}")

    def test_worker_processes_give_the_same(self, described: Mapping[str, Any]) -> None:
        expected = epochs_of(self.pipeline(described), EXECUTORS[0])
        assert_same(epochs_of(self.pipeline(described), IN_PROCESSES), expected, "in processes")

    def test_several_samples_are_made_of_one(self, described: Mapping[str, Any]) -> None:
        """By `expand`, also where batches end between them: each has what the sample has."""
        if SOURCES[described["kind"]].is_stream:
            pytest.skip("the items of an iterable are not known before its end")
        plain = self.pipeline({**described, "limit": 7})
        before, last = plain["stages"][:-1], plain["stages"][-1]["batch"]
        last = {**last, "ragged": dict.fromkeys(last.get("ragged", ()), "list")}  # padding depends on the others
        alone = epochs_of({**plain, "stages": [*before, {"batch": {**last, "size": 1}}]}, EXECUTORS[0])
        for num, size in ((2, 3), (3, 1), (2, 4)):
            several = {"expand": {"function": _as_it_is, "num": num}}
            for prefetch in EXECUTORS:
                batches = epochs_of(
                    {**plain, "stages": [*before, several, {"batch": {**last, "size": size}}]}, prefetch
                )
                rows = [
                    {name: values[row : row + 1] for name, values in batch.items()}
                    for batch in batches
                    for row in range(len(batch["__key__"]))
                ]
                assert_same(rows, [batch for batch in alone for _ in range(num)], f"{num} of one, {prefetch}")

    def test_it_resumes_exactly(self, described: Mapping[str, Any]) -> None:
        assert_resumes(self.pipeline({**described, "limit": 17}), EXECUTORS[-1])

    # ------------------------------------------------------------------------------------------------- its description

    def test_its_kind_goes_to_other_processes(self, described: Mapping[str, Any]) -> None:
        kind = SOURCES[described["kind"]]
        assert unpack(*pack(kind)).args is kind.args

    def test_an_unknown_key_is_refused(self, described: Mapping[str, Any]) -> None:
        pipeline = self.pipeline({**described, "limmit": 3})
        with pytest.raises(ConfigError, match=r"source\.limmit: unknown key 'limmit'; did you mean 'limit'"):
            parse(pipeline)


def _as_it_is(sample: dict[str, Any], number: int) -> None:
    """A function for `expand`: every one of the samples is equal to the one it is made of."""


@contextmanager
def _opening(described: Mapping[str, Any]) -> Iterator[Callable[..., Opened]]:
    plans = []

    def open_it(**more: Any) -> Opened:
        config = parse({"source": {**described, **more}, "stages": ["read", {"batch": {"size": 1}}]})
        plans.append(compile_pipeline(config, rank=0, world_size=1))
        return plans[-1].source, plans[-1].connector

    try:
        yield open_it
    finally:
        for plan in plans:
            plan.close()
