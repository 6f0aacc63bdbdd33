"""Several sources as one: what each batch holds, whoever makes it, and how training goes on from a state."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augmented_photos import digests, nothing_left_running  # noqa: F401 - a fixture for every test here
from mixtures import augmented_mixture, counted, negated, numbers

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import BulkConnector, ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError, StateError
from loaderkit.sampling.interleaving import Interleaving

WEB: dict[str, Any] = {"name": "web", "weight": 0.7}
CODE: dict[str, Any] = {"name": "code", "weight": 0.3}


def xs(loader: loaderkit.Loader, num_batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(loader, 1):
        found += batch["x"].tolist()
        if number == num_batches:
            break
    return found


@pytest.fixture(scope="module", name="reference")
def _reference(photos: Path, shards: Path) -> list[str]:
    with loaderkit.build(augmented_mixture(photos, shards), overrides={"prefetch.executor": "inline"}) as loader:
        return digests(loader, 2)


class TestBytes:
    @pytest.mark.parametrize(
        "overrides",
        [
            {"prefetch.concurrency": 1, "prefetch.batches": 1},
            {"prefetch.concurrency": 4},
            {"stages.read.workers": 2, "stages.batch.workers": 1},
            {"prefetch.executor": "process", "prefetch.processes": 2, "prefetch.batches": 4},
        ],
    )
    def test_same_whoever_makes_them(
        self, photos: Path, shards: Path, reference: list[str], overrides: dict[str, Any]
    ) -> None:
        with loaderkit.build(augmented_mixture(photos, shards), overrides=overrides) as loader:
            assert digests(loader, 2) == reference

    def test_after_every_batch_of_an_epoch(self, photos: Path, shards: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented_mixture(photos, shards)) as loader:
            num_batches = len(loader)
            states = [loader.state_dict(), *(json.loads(json.dumps(loader.state_dict())) for _ in loader)]
        for number in (0, 1, num_batches // 2, num_batches):
            with loaderkit.build(augmented_mixture(photos, shards)) as loader:
                loader.load_state_dict(states[number])
                rest = digests(loader) + ([] if number == num_batches else digests(loader))
                assert rest == reference[number:]

    def test_passes_over_a_source_draw_anew(self, photos: Path) -> None:
        """Two passes in an epoch over one photograph are two augmentations of it."""
        few = Pipeline.files(photos, include="**/*.jpg", limit=3)
        mixed = Pipeline.mix({"few": few}, epochs={"few": 4}).read().decode().random_resized_crop(16).batch(3)
        with loaderkit.build(mixed) as loader:
            images: dict[str, list[torch.Tensor]] = {}
            for batch in loader:
                for key, image in zip(batch["__key__"], batch["image"], strict=True):
                    images.setdefault(key, []).append(image)
        assert [len(ones) for ones in images.values()] == [4, 4, 4]
        for ones in images.values():
            assert len({one.numpy().tobytes() for one in ones}) == 4


class TestBatches:
    def test_each_sample_says_its_source(self) -> None:
        own = counted(20, 100, epochs=2, **CODE, stages=[{"call": {"function": "mixtures:negated"}}])
        with loaderkit.build(numbers(counted(1000, **WEB), own)) as loader:
            assert loader.sources == ["web", "code"]
            batches = list(loader)
        found = [
            (source, x)
            for batch in batches
            for source, x in zip(batch["__source__"].tolist(), batch["x"].tolist(), strict=True)
        ]
        assert batches[0]["__source__"].dtype == torch.int64
        assert all((x <= -100) == (source == 1) and (source == 1) == (x < 0) for source, x in found)
        # The course is that of the arithmetic, and the epoch ends with the last sample of the source that is used up.
        turns, _ = Interleaving([7, 3]).at(np.arange(len(found)))
        assert [source for source, _ in found] == turns.tolist()
        assert sorted(x for source, x in found if source == 1) == sorted(2 * [-100 - i for i in range(20)])
        assert found[-1][0] == 1

    def test_what_has_no_end(self) -> None:
        mixed = numbers(counted(10, **WEB), counted(5, 100, **CODE), mix={"stop": "never"})
        with loaderkit.build(mixed) as loader:
            assert "any number of samples" in repr(loader)
            with pytest.raises(TypeError, match="stop: never"):
                len(loader)
            found = xs(loader, 50)
            assert loader.epoch == 0
        assert len(found) == 200
        assert {x for x in found if x < 100} == set(range(10))
        assert sum(x >= 100 for x in found) == 60

    def test_weights_change_at_a_position(self) -> None:
        changes = [{"at": 40, "weights": {"web": 0.0, "code": 1.0}}]
        mixed = numbers(counted(500, **WEB), counted(500, 1000, **CODE), mix={"stop": "never", "changes": changes})
        with loaderkit.build(mixed) as loader:
            found = xs(loader, 20)
        assert sum(x >= 1000 for x in found[:40]) == 12
        assert all(x >= 1000 for x in found[40:])

    def test_output_names_it(self) -> None:
        with loaderkit.build(numbers(counted(9, **WEB), output=["x", "__source__"])) as loader:
            x, source = next(iter(loader))
        assert (len(x), source.tolist()) == (4, [0, 0, 0, 0])

    def test_its_name_is_reserved(self) -> None:
        with (
            loaderkit.build(Pipeline.dataset([{"__source__": 1}]).read().batch(1)) as loader,
            pytest.raises(StageError, match=r"'__source__' has a reserved name"),
        ):
            next(iter(loader))

    def test_workers_of_read_are_for_all_sources(self) -> None:
        mixed = numbers(counted(50, **WEB), counted(50, **CODE), prefetch={"concurrency": 2})
        with loaderkit.build(mixed, overrides={"stages.read.workers": 3}) as loader:
            xs(loader)
            stages = {row.name: row for row in loader.stats().stages}
            loader.resize("read", workers=2)
            assert loader.stats().tuning.pool_of("read.code").workers == 2  # type: ignore[union-attr]
            assert "workers: 2" in loader.to_yaml()
        assert stages["read.web"].workers == stages["read.code"].workers == 3
        assert stages["read.web"].num_items + stages["read.code"].num_items >= stages["batch"].num_items > 60


class TestRanks:
    @pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 5)])
    def test_another_number_of_ranks_continues(self, before: int, after: int) -> None:
        mixed = numbers(
            counted(60, epochs=2, **WEB),
            counted(15, 100, **CODE),
            counted(30, 200, name="more", repeat=True),
            mix={"stop": "all", "changes": [{"at": 30, "weights": {"web": 1, "code": 1, "more": 0.5}}]},
            batch=3,
        )
        with loaderkit.build(mixed, rank=0, world_size=1) as loader:
            whole = xs(loader)

        def by_position(
            world_size: int, state: dict[str, Any] | None, num: int | None
        ) -> tuple[list[int], dict[str, Any]]:
            columns, states = [], []
            for rank in range(world_size):
                with loaderkit.build(mixed, rank=rank, world_size=world_size) as loader:
                    if state is not None:
                        loader.load_state_dict(state)
                    columns.append(xs(loader, num))
                    states.append(loader.state_dict())
            assert all(one == states[0] for one in states)
            start = 0 if state is None else state["position"] % world_size  # the rank that has the first of them
            columns = columns[start:] + columns[:start]
            return [x for row in zip(*columns, strict=True) for x in row], states[0]

        first, state = by_position(before, None, 4)
        assert first == whole[: len(first)]
        rest, _ = by_position(after, state, None)
        assert (first + rest)[: len(whole)] == whole, "behind that come samples that are wrapped around"


class TestStates:
    def test_small_and_said_by_source(self) -> None:
        many = [counted(40 + n, n * 100, name=f"source-{n:02}", weight=1 + n / 7) for n in range(20)]
        with loaderkit.build(numbers(*many)) as loader:
            state = loader.state_dict()
        assert len(json.dumps(state)) < 1024
        others = [*many[:3], counted(41, name="source-03", weight=1 + 3 / 7), *many[4:]]
        with loaderkit.build(numbers(*others)) as loader, pytest.raises(StateError) as raised:
            loader.load_state_dict(state)
        assert "sources: the state has source-03:43:" in str(raised.value)
        assert "this loader source-03:41:" in str(raised.value)
        assert "source-04" not in str(raised.value)

    def test_a_later_change_of_weights_may_be_added(self) -> None:
        sources = counted(90, **WEB), counted(90, 1000, **CODE)
        plain = numbers(*sources, mix={"stop": "never"})
        with loaderkit.build(plain) as loader:
            first = xs(loader, 5)
            state = loader.state_dict()

        def changed(at: int) -> dict[str, Any]:
            return numbers(*sources, mix={"stop": "never", "changes": [{"at": at, "weights": {"web": 0, "code": 1}}]})

        with loaderkit.build(changed(24)) as loader:
            loader.load_state_dict(state)
            rest = xs(loader, 5)
        with loaderkit.build(changed(24)) as loader:
            assert xs(loader, 10) == first + rest
        assert all(x >= 1000 for x in rest[4:])
        with loaderkit.build(changed(19)) as loader, pytest.raises(StateError, match="mix: the state has"):
            loader.load_state_dict(state)

    @pytest.mark.parametrize(("part", "other"), [("mix", {}), ("seed", {"order": {"seed": 5}})])
    def test_what_is_not_exact_may_be_accepted(self, part: str, other: dict[str, Any]) -> None:
        """Training goes on at the same place of the other order, at another world size, too."""
        web, code = counted(90, weight=0.7, name="web"), counted(90, 1000, weight=0.3, name="code")
        with loaderkit.build(numbers(web, code), rank=0, world_size=1) as loader:
            xs(loader, 5)
            state = json.loads(json.dumps(loader.state_dict()))
        if part == "mix":
            web["weight"] = 0.4
        with loaderkit.build(numbers(web, code, batch=1, **other), rank=0, world_size=1) as loader:
            own = xs(loader)
        for rank in range(2):
            with loaderkit.build(numbers(web, code, batch=1, **other), rank=rank, world_size=2) as loader:
                with pytest.raises(StateError, match=rf"accept=\['{part}'\]"):
                    loader.load_state_dict(state)
                assert xs(loader, 1) == [own[rank]], "what was refused has changed nothing"
                loader.load_state_dict(state, accept=[part])
                assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 20)
                assert xs(loader, 10) == own[20 + rank : 40 + rank : 2]


class TestErrors:
    def test_fields_that_differ_name_the_sources(self) -> None:
        other = Pipeline.dataset([{"x": torch.zeros(3), "y": 1}] * 9)
        mixed = Pipeline.mix({"web": Pipeline.dataset([{"x": torch.zeros(2)}] * 9), "code": other}).read().batch(2)
        message = r"'x' is a tensor, float32 \[3\] in code, a tensor, float32 \[2\] in web; 'y' is .* in code, missing"
        with loaderkit.build(mixed) as loader, pytest.raises(ConfigError, match=message):
            next(iter(loader))

    def test_labels_of_other_classes(self, photos: Path) -> None:
        one = Pipeline.files(photos, include="[ab]*/*.jpg", label="parent")
        all_of_them = Pipeline.files(photos, include="**/*.jpg", label="parent")
        mixed = Pipeline.mix({"one": one, "all": all_of_them}).read().decode().resize([8, 8]).batch(2)
        with pytest.raises(ConfigError, match="one label would stand for several classes"):
            loaderkit.build(mixed)
        agreed = Pipeline.mix(
            {
                "one": Pipeline.files(photos, include="[ab]*/*.jpg", label="parent", classes=["ant", "bee", "cat"]),
                "all": all_of_them,
            }
        )
        with loaderkit.build(agreed.read().decode().resize([8, 8]).batch(2)) as loader:
            assert loader.classes == ["ant", "bee", "cat"]

    @pytest.mark.parametrize("policy", ["skip", "replace"])
    def test_bad_samples_by_source(self, tmp_path: Path, policy: str) -> None:
        bad = (3, 4, 8)
        mixed = numbers(
            counted(70, **WEB),
            counted(30, 100, bad, epochs=2, **CODE),
            errors={"on_bad_sample": policy, "quarantine": str(tmp_path / "bad.jsonl")},
        )
        with loaderkit.build(mixed) as loader:
            batches = list(loader)
            table = {row["name"]: row for row in loader.stats().to_dict()["sources"]}
        lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
        assert {(line["mixed"], line["key"]) for line in lines} == {("code", str(index)) for index in bad}
        assert len(lines) == 3, "once an epoch, also in the second pass over it"
        assert all(line["source"] == "code: Counted" for line in lines)
        assert (table["web"]["num_bad"], table["code"]["num_bad"]) == (0, 3)
        assert table["web"]["num_items"] > 60
        sources = torch.cat([batch["__source__"] for batch in batches])
        x = torch.cat([batch["x"] for batch in batches])
        assert ((x >= 100) == (sources == 1)).all(), "what replaces a sample is of the same source"
        if policy == "replace":
            turns, _ = Interleaving([7, 3]).at(np.arange(len(sources)))
            assert sources.tolist() == turns.tolist()


class _Remote(BulkConnector):
    """A store that is slow to answer, so the loader reads ahead from it."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.inner = MemoryConnector(objects)
        self.read: list[str] = []

    def list(self, prefix: str) -> Iterator[Any]:
        return self.inner.list(prefix)

    def stat(self, key: str) -> Any:
        return self.inner.stat(key)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.read.append(key)
        self.inner.read_into(key, start, buffer, etag=etag)

    def describe(self, key: str) -> str:
        return f"remote/{key}"

    def close(self) -> None:
        pass


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_remote_sources_are_read_ahead(shuffle: str) -> None:
    web = _Remote({f"{n:03}.txt": f"web {n}".encode() for n in range(90)})
    code = _Remote({f"{n:03}.txt": f"code {n}".encode() for n in range(40)})
    sources = [
        {"name": "web", "kind": "files", "url": "web://x", "include": "*", "fields": {"text": "txt"}, "weight": 0.7},
        {"name": "code", "kind": "files", "url": "code://x", "include": "*", "fields": {"text": "txt"}, "weight": 0.3},
    ]
    described = {"sources": sources, "order": {"shuffle": shuffle}, "mix": {"stop": "all"}}
    described["stages"] = ["read", {"batch": {"size": 8}}]
    texts = {}
    for executor in ("inline", "thread"):
        overrides = {"prefetch.executor": executor}
        with loaderkit.build(described, connectors={"web": web, "code": code}, overrides=overrides) as loader:
            texts[executor] = [text for batch in loader for text in batch["text"]]
            store = loader.stats().store
    assert texts["inline"] == texts["thread"]
    assert sorted(texts["thread"]) == sorted([b"web %d" % n for n in range(90)] + [b"code %d" % n for n in range(40)])
    wanted = sum(map(len, texts["thread"]))
    assert store["num_direct_reads"] <= 2, "but for the first samples, which show what a batch holds"
    assert store["ahead_bytes"] >= wanted - 20


def test_remote_sources_are_opened_and_tried_at_once() -> None:
    """Each listing, and each first sample, waits until all are under way."""
    listing, first = threading.Barrier(3, timeout=120), threading.Barrier(3, timeout=120)

    class Waiting(_Remote):
        def list(self, prefix: str) -> Iterator[Any]:
            listing.wait()
            return self.inner.list(prefix)

        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            if not self.read:
                self.read.append(key)
                first.wait()
            super().read_into(key, start, buffer, etag=etag)

    names = ["web", "code", "more"]
    stores = {name: Waiting({f"{n}.txt": f"{name} {n}".encode() for n in range(8)}) for name in names}
    described = {
        "sources": [
            {"name": name, "kind": "files", "url": f"{name}://x", "include": "*", "fields": {"text": "txt"}}
            for name in names
        ],
        "mix": {"stop": "all"},
        "stages": ["read", {"batch": {"size": 4}}],
        "prefetch": {"concurrency": 2},
    }
    with loaderkit.build(described, connectors=stores) as loader:
        texts = [text for batch in loader for text in batch["text"]]
    assert sorted(texts) == sorted(f"{name} {n}".encode() for name in names for n in range(8))


def test_a_remote_source_that_comes_in_later_and_ends() -> None:
    """What is read ahead of it begins and ends with its weight."""
    web, code = (_Remote({f"{n:02}.txt": f"{name} {n}".encode() for n in range(30)}) for name in ("web", "code"))
    entry = {"kind": "files", "include": "*", "fields": {"text": "txt"}}
    changes = [
        {"at": at, "weights": weights} for at, weights in ((80, {"web": 1, "code": 1}), (160, {"web": 1, "code": 0}))
    ]
    described = {
        "sources": [
            {"name": "web", "url": "web://x", **entry},
            {"name": "code", "url": "code://x", "weight": 0.0, **entry},
        ],
        "mix": {"stop": "never", "changes": changes},
        "stages": ["read", {"batch": {"size": 8}}],
    }
    with loaderkit.build(described, connectors={"web": web, "code": code}) as loader:
        texts = [text for batch, _ in zip(loader, range(40), strict=False) for text in batch["text"]]
    of_code = [number for number, text in enumerate(texts) if text.startswith(b"code")]
    assert len(of_code) == 40
    assert of_code[0] in (80, 81)
    assert of_code[-1] in (158, 159)


def test_a_function_given_as_an_object() -> None:
    with loaderkit.build(
        Pipeline.mix({"web": Pipeline.dataset([{"x": n} for n in range(8)]).call(negated)}).read().batch(8)
    ) as loader:
        assert sorted(next(iter(loader))["x"].tolist()) == list(range(-7, 1))
