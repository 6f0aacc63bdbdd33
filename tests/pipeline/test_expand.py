"""`expand`: which patches come when is what a plain loop says, whoever makes them, and a volume is read once."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expanding import Volumes, described, draws_in, expected, found_in, order_of, patch

import loaderkit
from loaderkit.cli import main
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError, StateError
from loaderkit.testing.runs import assert_same

ORDERS: list[dict[str, Any]] = [{"shuffle": "global", "seed": 3}, {"shuffle": "none"}]
EXECUTORS: list[dict[str, Any]] = [
    {"executor": "inline"},
    {"executor": "thread", "concurrency": 1},
    {"executor": "thread", "concurrency": 4, "batches": 6},
]


def batches_of(pipeline: dict[str, Any], rank: int = 0, world_size: int = 1, **state: Any) -> list[Any]:
    """Those of the epoch, each with the state behind it."""
    with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
        if state:
            loader.load_state_dict(**state)
        iterator = iter(loader)
        num, found = len(iterator), [(batch, json.dumps(loader.state_dict())) for batch in iterator]
        assert num == len(found)
        return found


@pytest.mark.parametrize("number", range(8))
def test_by_a_plain_loop(number: int, rng: random.Random) -> None:
    dataset = Volumes(rng.randint(3, 14))
    num, size, world_size = rng.randint(1, 5), rng.randint(1, 7), rng.choice([1, 1, 2, 3])
    drop_last, order = rng.random() < 0.5, rng.choice(ORDERS)
    if drop_last and dataset.num * num < size * world_size:
        size = 1
    steps = expected(order_of(dataset, order, 1), num, size, world_size, drop_last=drop_last)
    at_once, draws = rng.random() < 0.5, dict[Any, float]()
    for prefetch in EXECUTORS:
        pipeline = described(
            dataset, num, size, drop_last=drop_last, order={**order, "epochs": 2}, prefetch=prefetch, at_once=at_once
        )
        for rank in range(world_size):
            with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
                assert loader.num_samples == dataset.num * num
                assert len(loader) == len(steps)
                loader.set_epoch(1)
                batches = list(loader)
            assert [found_in(batch) for batch in batches] == [step[rank] for step in steps]
            for batch in batches:
                for patch_of, draw in draws_in(batch).items():
                    assert draws.setdefault(patch_of, draw) == draw  # whoever makes it
    assert len(set(draws.values())) == len(draws)  # each has its own


@pytest.mark.parametrize("number", range(4))
def test_a_state_resumes_between_the_samples_of_one(number: int, rng: random.Random) -> None:
    dataset, num = Volumes(12), rng.randint(2, 5)
    world_size, size = rng.choice([(1, 6), (2, 3), (3, 2), (6, 1)])
    order = {**ORDERS[number % 2], "epochs": 1}
    pipeline = described(dataset, num, size, order=order, prefetch=rng.choice(EXECUTORS))
    ranks = [batches_of(pipeline, rank, world_size) for rank in range(world_size)]
    steps = [[found_in(batch) for batch, _ in rank] for rank in ranks]
    assert len({state for rank in ranks for _, state in rank[:3]}) == 3  # the same on all ranks
    at = rng.randrange(len(steps[0]) - 1)
    state = json.loads(ranks[0][at][1])
    for now, each in ((1, 6), (2, 3), (3, 2), (6, 1)):
        rest = [
            batches_of(described(dataset, num, each, order=order, prefetch=EXECUTORS[-1]), rank, now, state=state)
            for rank in range(now)
        ]
        for step in range(at + 1, len(steps[0])):
            here = sorted(pair for rank in rest for pair in found_in(rank[step - at - 1][0]))
            there = sorted(pair for rank in steps for pair in rank[step])
            if step + 1 < len(steps[0]) or 12 * num % 6 == 0:
                assert here == there
            for rank in rest:
                for patch_of, draw in draws_in(rank[step - at - 1][0]).items():
                    assert {patch_of: draw}.items() <= all_draws(ranks).items()


def all_draws(ranks: list[Any]) -> dict[Any, float]:
    return {pair: draw for rank in ranks for batch, _ in rank for pair, draw in draws_in(batch).items()}


def test_worker_processes_give_the_same(rng: random.Random) -> None:
    dataset, num, size = Volumes(9), rng.randint(2, 4), rng.randint(2, 5)
    pipeline = described(dataset, num, size, order={"seed": 1, "epochs": 1})
    found = [
        [batch for batch, _ in batches_of({**pipeline, "prefetch": prefetch})]
        for prefetch in ({"executor": "inline"}, {"executor": "process", "processes": 2, "concurrency": 4})
    ]
    assert_same(found[1], found[0], "in processes")


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8])
def test_a_volume_is_read_once(size: int, rng: random.Random) -> None:
    for prefetch in EXECUTORS:
        counts = []
        for epochs in (1, 3):
            dataset, order = Volumes(25), {"seed": rng.randrange(99), "epochs": epochs}
            with loaderkit.build(
                described(dataset, 4, size, order=order, prefetch=prefetch), rank=0, world_size=1
            ) as loader:
                assert sum(len(batch["__key__"]) for _ in range(epochs) for batch in loader) == 100 * epochs
            counts.append(dataset.counts)
        # What shows the layout of a batch is read in both.
        assert counts[1] - counts[0] == Counter(dict.fromkeys(range(25), 2)), prefetch


def test_it_ends_and_seeks_in_the_middle(rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    """Also where batches wait for what others make."""
    num, order = 5, {"shuffle": "none"}
    pipeline = described(Volumes(20), num, 1, order=order, prefetch=EXECUTORS[-1])
    for _ in range(12):
        with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
            begin = 0
            for _ in range(2):
                stop = begin + rng.randrange(9)
                for place, batch in enumerate(loader, begin):
                    assert found_in(batch) == [divmod(place, num)]
                    if place == stop:
                        break
                begin = rng.randrange(90)
                loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": begin})
    assert not caplog.records


def test_stages_before_run_once_and_those_behind_for_each(rng: random.Random) -> None:
    calls: list[tuple[str, float]] = []

    def before(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        calls.append((sample["__key__"], rng.random()))
        return {"before": calls[-1][1]}

    def behind(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"behind": rng.random()}

    dataset, num = Volumes(10), 3
    pipeline = described(dataset, num, 4, order={"seed": 2, "epochs": 1}, prefetch={"executor": "thread"})
    pipeline["stages"][1:1] = [{"call": {"function": before, "name": "before"}}]
    pipeline["stages"][3:3] = [{"call": {"function": behind, "name": "behind"}}]
    batches = [batch for batch, _ in batches_of(pipeline)]
    drawn = dict(calls)
    assert len(drawn) == 10
    assert len(calls) == 20  # all but the first show the layout of a batch, too, with it
    for batch in batches:
        assert batch["before"].tolist() == [drawn[key] for key in batch["__key__"]]
    assert len({value for batch in batches for value in batch["behind"].tolist()}) == 30


def test_no_sample_lies_in_the_memory_of_another(rng: random.Random) -> None:
    """A stage behind that changes what it is given changes nothing else, and the function itself is told."""

    def whole(sample: dict[str, Any], number: int) -> dict[str, Any]:
        return {"volume": sample["volume"]}

    def add(sample: dict[str, Any]) -> None:
        sample["volume"] += 1

    def spoil(sample: dict[str, Any], number: int) -> None:
        sample["volume"] += number

    for dataset in (Volumes(4), Tensors(4)):
        pipeline = described(dataset, 3, 2, order={"shuffle": "none", "epochs": 1}, prefetch={"executor": "thread"})
        pipeline["stages"][1] = {"expand": {"function": whole, "num": 3}}
        pipeline["stages"].insert(2, {"call": {"function": add}})
        found = torch.cat([batch["volume"] for batch, _ in batches_of(pipeline)])
        for place, volume in enumerate(found):
            assert torch.equal(volume, torch.arange(24).reshape(4, 6) + 100 * (place // 3) + 1)
        pipeline["stages"][1] = {"expand": {"function": spoil, "num": 3}}
        with pytest.raises(StageError, match=r"read-only|in place"):
            batches_of(pipeline)


class Tensors(Volumes):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"volume": torch.arange(24).reshape(4, 6) + 100 * index, "index": index}


# ------------------------------------------------------------------------------------------------------- bad samples


@pytest.mark.parametrize("size", [6, 7, 8])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_bad_volumes(policy: str, size: int, tmp_path: Path, rng: random.Random) -> None:
    num, order = 4, {"seed": rng.randrange(99), "epochs": 1}
    bad = tuple(rng.sample(range(12), 3))
    quarantine = tmp_path / "bad.jsonl"
    found = []
    for prefetch in EXECUTORS:
        quarantine.unlink(missing_ok=True)
        errors = {
            "on_bad_sample": policy,
            "quarantine": str(quarantine),
            "max_bad_samples": 3 if policy == "skip" else 9,
        }
        dataset = Volumes(12, bad)
        pipeline = described(dataset, num, size, order=order, errors=errors, prefetch=prefetch)
        with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
            batches = list(loader)
            num_failed = {row["name"]: row["num_failed"] for row in loader.stats().to_dict()["stages"]}
        found.append(batches)
        pairs = [pair for batch in batches for pair in found_in(batch)]
        lines = [json.loads(line) for line in quarantine.read_text().splitlines()]
        assert {line["key"] for line in lines} == {str(index) for index in bad}
        assert len(lines) == 3  # one a volume
        assert sum(num_failed.values()) == num_failed["read"] == 3
        wanted = [
            pair for step in expected(order_of(dataset, order, 0), num, size, 1, drop_last=False) for pair in step[0]
        ]
        if policy == "skip":
            assert pairs == [pair for pair in wanted if pair[0] not in bad]
            continue
        assert [pair[1] for pair in pairs] == [pair[1] for pair in wanted]
        by_volume: dict[int, set[int]] = {}
        for (index, _), (instead, _) in zip(wanted, pairs, strict=True):
            by_volume.setdefault(index, set()).add(instead)
        assert all(len(instead) == 1 for instead in by_volume.values())  # of a bad one all, of one other
        assert all(index in bad or instead == {index} for index, instead in by_volume.items())
    for batches in found[1:]:
        assert_same(batches, found[0], policy)


def test_raising_names_the_volume_in_its_place(rng: random.Random) -> None:
    bad = rng.randrange(1, 12)
    for prefetch in EXECUTORS:
        pipeline = described(Volumes(12, (bad,)), 4, 3, order={"shuffle": "none", "epochs": 1}, prefetch=prefetch)
        found = []
        with pytest.raises(StageError, match=f"read failed for sample '{bad}'"), loaderkit.build(pipeline) as loader:
            for batch in loader:
                found += found_in(batch)
        assert found == [(index, number) for index in range(bad) for number in range(4)][: 4 * bad // 3 * 3]


def test_a_sample_that_fails_is_bad_alone_and_tried_again(
    tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "bad = {(2, 1), (7, 3)}\n"
        "def patch(sample, number):\n"
        "    if (sample['index'], number) in bad:\n"
        "        raise ValueError('unlucky')\n"
        "    return {'volume': sample['volume'][number], 'number': number}\n"
        "from expanding import Volumes\n"
        "def make():\n"
        "    return Volumes(9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = {
        "source": {"kind": "dataset", "object": "mine:make"},
        "stages": ["read", {"expand": {"function": "mine:patch", "num": 4}}, {"batch": {"size": 6}}],
        "order": {"seed": rng.randrange(99), "epochs": 1},
        "errors": {"on_bad_sample": "skip", "quarantine": str(tmp_path / "bad.jsonl")},
    }
    pairs = [pair for batch, _ in batches_of(pipeline) for pair in found_in(batch)]
    assert sorted(pairs) == [(i, n) for i in range(9) for n in range(4) if (i, n) not in {(2, 1), (7, 3)}]
    (tmp_path / "pipeline.json").write_text(json.dumps(pipeline))
    arguments = ["run", str(tmp_path / "pipeline.json"), "--only-quarantined", str(tmp_path / "bad.jsonl")]
    assert main(arguments) == 1
    assert "2 bad" in capsys.readouterr().out
    monkeypatch.setattr("mine.bad", {(2, 1)})
    assert main(arguments) == 1
    assert "1 bad, 1 good" in capsys.readouterr().out


def test_filters_before_and_behind(rng: random.Random) -> None:
    left_out, number_out = set(rng.sample(range(10), 4)), rng.randrange(3)
    pipeline = described(Volumes(10), 3, 4, order={"shuffle": "none", "epochs": 1}, prefetch=rng.choice(EXECUTORS))
    pipeline["stages"].insert(1, {"filter": {"function": lambda sample: sample["index"] not in left_out}})
    pipeline["stages"].insert(3, {"filter": {"function": lambda sample: sample["number"] != number_out}})
    for stage in (pipeline["stages"][1], pipeline["stages"][3]):
        stage["filter"]["on_empty_batch"] = "skip"
    with loaderkit.build(pipeline) as loader:
        pairs = [pair for batch in loader for pair in found_in(batch)]
        assert loader.stats().num_dropped + len(pairs) == 30
    assert pairs == [(i, n) for i in range(10) for n in range(3) if i not in left_out and n != number_out]


# ------------------------------------------------------------------------------------------------------------ stores


class Far(MemoryConnector):
    """Reads of it wait for a network, as far as the loader knows: they are read ahead."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.num_bytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        self.num_bytes += len(buffer)


def name_row(sample: dict[str, Any], number: int) -> dict[str, Any]:
    return {"text": f"{sample['__key__']} {number}", "number": number}


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_from_a_store_that_is_read_ahead(shuffle: str, rng: random.Random) -> None:
    objects = {f"{number:02}.txt": rng.randbytes(400).hex().encode() for number in range(30)}
    num, world_size = rng.randint(2, 5), rng.choice([1, 2])
    size = num * rng.randint(1, 3)
    pipeline = {
        "source": {"kind": "files", "url": "memory://", "include": "*.txt", "fields": {"text": "txt"}},
        "stages": ["read", "decode", {"expand": {"function": name_row, "num": num}}, {"batch": {"size": size}}],
        "order": {"seed": 1, "epochs": 1, "shuffle": shuffle, "block": {"block": 2400, "window": 2, "lanes": 2}},
        "prefetch": {"executor": "thread", "concurrency": 3},
    }
    if shuffle == "global":
        del pipeline["order"]["block"]  # type: ignore[attr-defined]
    found, num_bytes = [], 0
    for rank in range(world_size):
        connector = Far(objects)
        with loaderkit.build(pipeline, rank=rank, world_size=world_size, connectors={"memory": connector}) as loader:
            for batch in loader:
                wrapped = batch.get("__wrapped__", torch.zeros(len(batch["text"]), dtype=torch.bool)).tolist()
                found += [text for text, is_wrapped in zip(batch["text"], wrapped, strict=True) if not is_wrapped]
        num_bytes += connector.num_bytes
    assert sorted(found) == [f"{key} {number}" for key in sorted(objects) for number in range(num)]
    if world_size == 1:
        assert num_bytes <= 31 * 800  # each once, and the first for the layout of a batch


# ---------------------------------------------------------------------------------------------------------- mixtures


def test_of_a_mixture(rng: random.Random) -> None:
    """Samples of each source come by its weight, `num` of each."""
    num, size = 3, rng.choice([3, 4, 7])
    sources = [
        {"name": name, "kind": "dataset", "object": Volumes(many), "thread_safe": True, "weight": weight}
        for name, many, weight in (("a", 30, 0.7), ("b", 20, 0.3))
    ]
    plain = {"sources": sources, "stages": ["read", {"batch": {"size": 1}}], "order": {"seed": 4, "epochs": 1}}
    with loaderkit.build(plain, rank=0, world_size=1) as loader:
        samples = [(int(batch["__source__"][0]), int(batch["index"][0])) for batch in loader]
    for prefetch in EXECUTORS:
        pipeline = {**described(Volumes(1), num, size, order=plain["order"], prefetch=prefetch), "sources": sources}
        del pipeline["source"]
        with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
            batches = list(loader)
            rows = loader.stats().to_dict()["sources"]
        found = [
            (source, *pair)
            for batch in batches
            for source, pair in zip(batch["__source__"].tolist(), found_in(batch), strict=True)
        ]
        assert found == [(*sample, number) for sample in samples for number in range(num)]
        assert [row["num_samples"] for row in rows] == [sum(one[0] == n for one in found) for n in range(2)]
        assert rows[0]["share"] == pytest.approx(rows[0]["weight"], abs=0.05)


# ------------------------------------------------------------------------------------------------- what is refused


def too_few(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{}, {}]


def no_list(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": 1}


def no_dicts(sample: dict[str, Any]) -> list[Any]:
    return [{}, None, {}]


def no_dict(sample: dict[str, Any], number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_few, "returned 2 samples, and `num` is 3"),
        (no_list, "returned dict; it must return a list of `num: 3` dicts"),
        (no_dicts, "returned None as sample 1"),
        (no_dict, "returned int; it must return a dict"),
    ],
)
def test_functions_that_do_not_fit(function: Any, said: str) -> None:
    pipeline = described(Volumes(4), 3, 3, prefetch={"executor": "inline"})
    pipeline["stages"][1] = {"expand": {"function": function, "num": 3}}
    with pytest.raises(StageError, match=said):
        batches_of(pipeline)


def test_pipelines_that_do_not_fit() -> None:
    def refused(said: str, stages: list[Any], **more: Any) -> None:
        pipeline = {"source": {"kind": "dataset", "object": Volumes(4)}, "stages": stages, **more}
        with pytest.raises(ConfigError, match=said):
            loaderkit.build(pipeline)

    expand: dict[str, Any] = {"expand": {"function": patch, "num": 3}}
    batch: dict[str, Any] = {"batch": {"size": 4}}
    refused("'num' is missing", ["read", {"expand": {"function": patch}}, batch])
    refused("num.*greater than 0", ["read", {"expand": {"function": patch, "num": 0}}, batch])
    refused("put it before `batch`", ["read", batch, expand])
    refused("a second `expand`", ["read", expand, {"expand": {"function": patch, "num": 2, "name": "b"}}, batch])
    refused("`expand` makes others of them", ["read", expand, {"batch": {"tokens": 64, "field": "volume"}}])
    refused("workers.*multiple of `expand.num`", [{"read": {"workers": 2}}, expand, batch])
    refused(
        "counts the samples that it makes",
        ["read", expand, batch],
        source={"kind": "iterable", "object": [{"volume": np.zeros((4, 6))}]},
    )
    with pytest.raises(ConfigError, match="belongs to the common `stages`"):
        loaderkit.build(
            {
                "sources": [
                    {"name": "a", "kind": "dataset", "object": Volumes(4), "weight": 1, "stages": [expand]},
                    {"name": "b", "kind": "dataset", "object": Volumes(4), "weight": 1},
                ],
                "stages": ["read", batch],
            }
        )


def test_dedicated_workers_where_batches_cut_no_sample(rng: random.Random) -> None:
    pipeline = described(Volumes(8), 3, 6, order={"shuffle": "none", "epochs": 1})
    pipeline["stages"][0] = {"read": {"workers": 2}}
    pairs = [pair for batch, _ in batches_of(pipeline) for pair in found_in(batch)]
    assert pairs == [(index, number) for index in range(8) for number in range(3)]


def test_commands_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline whose batches cut samples has a stage more, which no command stumbles over."""
    (tmp_path / "data").mkdir()
    for number in range(6):
        (tmp_path / "data" / f"{number}.txt").write_text(str(number))
    (tmp_path / "mine_too.py").write_text(
        "def name(sample, number):\n    return {'txt': sample['txt'] + str(number)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stages = ["read", "decode", {"expand": {"function": "mine_too:name", "num": 3}}, {"batch": {"size": 2}}]
    source = {"kind": "files", "url": str(tmp_path / "data"), "include": "*.txt"}
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"source": source, "stages": stages}))
    for command in (["check"], ["explain"], ["run", "--batches", "5"], ["pack", "--out", str(tmp_path / "shards")]):
        assert main([command[0], str(path), *command[1:]]) == 0, command
    assert "18" in capsys.readouterr().out
    with loaderkit.build(path) as loader, loader.profile() as report:
        assert len(list(loader)) == 9
    assert "expand.share" in [row["name"] for row in report.to_dict()["stages"]]
    assert str(report)


def test_a_state_of_another_number_is_refused() -> None:
    state = json.loads(batches_of(described(Volumes(6), 3, 4))[0][1])
    for num in (2, 1):
        with pytest.raises(StateError, match="3 are made of one"):
            batches_of(described(Volumes(6), num, 4), state=state, accept=["stages"])
