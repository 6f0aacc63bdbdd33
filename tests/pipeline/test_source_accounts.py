"""`loader.stats()` by source: exact counts of what the loop got and did not get, whoever makes the batches."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import counted, numbers
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit.cli import main
from loaderkit.diagnosis.stats import SourceStats
from loaderkit.errors import StageError, TooManyBadSamplesError

EXECUTORS = ["inline", "thread", "process"]


def keep(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 7 != 3)


def drawn(rng: random.Random) -> list[dict[str, Any]]:
    """Two to four sources of numbers that tell whose they are, some of which cannot be had."""
    sources = []
    for number in range(rng.randint(2, 4)):
        size = rng.randint(9, 60)
        bad = tuple(sorted(rng.sample(range(size), rng.randint(0, size // 5))))
        filtered = {"stages": [{"filter": {"function": "test_source_accounts:keep"}}]}
        more: dict[str, Any] = rng.choice([{}, {"epochs": 2}, filtered])
        name, weight = "abcd"[number], round(rng.uniform(0.1, 1.0), 2)
        sources.append(counted(size, 1000 * number, bad, name=name, weight=weight, **more))
    return sources


def rows_of(loader: loaderkit.Loader) -> dict[str, SourceStats]:
    return {row.name: row for row in loader.stats().source_rows()}


def planned(sources: list[dict[str, Any]], size: int) -> list[list[tuple[int, int]]]:
    """By batch the turns (source, number) of the same mixture without bad samples and filters."""
    plain = [{**source, "args": {**source["args"], "bad": []}, "stages": []} for source in sources]
    with loaderkit.build(numbers(*plain, batch=size, mix={"stop": "all"})) as loader:
        return [list(zip(batch["__source__"].tolist(), batch["x"].tolist(), strict=True)) for batch in loader]


def outcome(source: dict[str, Any], x: int, policy: str) -> str:
    """What becomes of a turn."""
    if x - source["args"]["begin"] in source["args"]["bad"]:
        return "skipped" if policy == "skip" else "replaced"
    return "dropped" if source.get("stages") and x % 7 == 3 else "samples"


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_counts_are_those_of_the_batches(executor: str, policy: str, rng: random.Random) -> None:
    num_left = 1 if executor == "process" else 4
    while num_left:
        sources, size = drawn(rng), rng.randint(3, 9)
        turns_of = planned(sources, size)
        outcomes = [{outcome(sources[number], x, policy) for number, x in turns} for turns in turns_of]
        whole = list(itertools.takewhile(lambda found: "samples" in found, outcomes))  # else the next one is an error
        if not whole:
            continue
        num_left -= 1
        num_batches = rng.randint(1, len(whole))
        errors = {"on_bad_sample": policy}
        mixed = numbers(*sources, batch=size, mix={"stop": "all"}, errors=errors, prefetch={"executor": executor})
        with loaderkit.build(mixed) as loader:
            batches = [batch for _, batch in zip(range(num_batches), loader, strict=False)]
            stats = loader.stats()
            rows = rows_of(loader)
        given = Counter(np.concatenate([batch["__source__"].numpy() for batch in batches]).tolist())
        turned = list(itertools.chain(*turns_of[:num_batches]))
        for number, source in enumerate(sources):
            row = rows[source["name"]]
            turns = Counter(outcome(source, x, policy) for which, x in turned if which == number)
            assert row.num_samples == given[number]
            if policy == "skip":
                assert (row.num_samples, row.num_dropped, row.num_skipped) == (
                    turns["samples"],
                    turns["dropped"],
                    turns["skipped"],
                )
            else:  # another one of the same source takes the place, or is dropped there
                assert row.num_replaced == turns["replaced"]
                assert row.num_samples + row.num_dropped == sum(turns.values())
            assert row.num_items >= sum(turns.values())
            assert row.share == pytest.approx(given[number] / sum(given.values()))
        assert sum(given.values()) == stats.num_samples
        assert sum(row.num_dropped for row in rows.values()) == stats.num_dropped
        assert sum(row.weight for row in rows.values()) == pytest.approx(1)
        json.dumps(stats.to_dict())


def test_a_single_source_has_no_rows() -> None:
    with loaderkit.build({"source": counted(20), "stages": ["read", {"batch": {"size": 4}}]}) as loader:
        list(loader)
        stats = loader.stats()
    assert stats.source_rows() == []
    assert "sources" not in stats.to_dict()
    assert stats.verdict().source is None


def test_skipped_samples_do_not_count_as_given() -> None:
    described = {"source": counted(20, 0, (3, 4)), "stages": ["read", {"batch": {"size": 4}}]}
    for executor in EXECUTORS:
        overrides = {"prefetch.executor": executor, "errors.on_bad_sample": "skip"}
        with loaderkit.build(described, overrides=overrides) as loader:
            assert sum(len(batch["x"]) for batch in loader) == loader.stats().num_samples == 18


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_interval_has_its_own_counts(executor: str) -> None:
    """Where the weights change, it tells the share that was planned in it."""
    changes = [{"at": 40, "weights": {"web": 0.25, "code": 0.75}}]
    mixed = numbers(
        counted(500, name="web", weight=3),
        counted(500, 1000, tuple(range(0, 500, 9)), name="code", weight=1),
        mix={"stop": "never", "changes": changes},
        errors={"on_bad_sample": "skip"},
        prefetch={"executor": executor},
    )
    with loaderkit.build(mixed) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(5)]
        middle = loader.stats()
        rest = [next(iterator) for _ in range(15)]
        whole, later = loader.stats(), loader.stats(since=middle)
    for stats, batches, weight in (
        (middle, first, 0.75),
        (later, rest, (20 * 0.75 + 40 * 0.25) / 60),
        (whole, [*first, *rest], (40 * 0.75 + 40 * 0.25) / 80),
    ):
        web, code = stats.source_rows()
        sources = torch.cat([batch["__source__"] for batch in batches])
        assert [web.num_samples, code.num_samples] == torch.bincount(sources).tolist()
        assert web.num_skipped == 0
        assert code.num_skipped == 4 * len(batches) - len(sources)
        assert web.weight == pytest.approx(weight)
        assert code.num_bad == code.num_skipped > 0


def test_passes_and_the_end_of_a_source() -> None:
    mixed = numbers(
        counted(60, name="web", weight=0.7),
        counted(10, 100, name="code", weight=0.3, epochs=2),
        counted(7, 200, name="more", weight=0.2, repeat=True),
        mix={"stop": "all"},
    )
    seen = Counter[str]()
    with loaderkit.build(mixed) as loader:
        for epoch in range(2):
            here = Counter[str]()
            for batch in loader:
                seen.update(names := [("web", "code", "more")[number] for number in batch["__source__"]])
                here.update(names)
                for name, row in rows_of(loader).items():
                    assert row.num_passes == pytest.approx(seen[name] / {"web": 60, "code": 10, "more": 7}[name])
                    assert row.is_used_up == (here[name] == {"web": 60, "code": 20, "more": None}[name])
            state = loader.state_dict()
            assert epoch == 1 or here["code"] == 20
    with loaderkit.build(mixed) as loader:
        loader.load_state_dict(state)
        resumed = rows_of(loader)
        assert resumed["more"].num_passes == pytest.approx(seen["more"] / 7)
        next(iter(loader))
        assert rows_of(loader)["web"].weight == pytest.approx(0.7 / 1.2), "of this run alone"


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_counts_begin_anew_after_an_error(executor: str) -> None:
    mixed = numbers(
        counted(100, name="web"),
        counted(100, 1000, (5,), name="code"),
        order={"shuffle": "none"},
        prefetch={"executor": executor},
    )
    with loaderkit.build(mixed) as loader:
        with pytest.raises(StageError, match=r"code: Counted"):
            list(loader)
        rows = rows_of(loader)
        assert (rows["web"].num_bad, rows["code"].num_bad) == (0, 1)
        assert rows["web"].num_samples + rows["code"].num_samples == 8
        loader.load_state_dict({**loader.state_dict(), "position": 40})
        next(iter(loader))
        rows = rows_of(loader)
        assert [row.num_bad for row in rows.values()] == [0, 0]
        assert [row.num_samples for row in rows.values()] == [2, 2]
        assert [row.weight for row in rows.values()] == [0.5, 0.5]


def test_too_many_bad_samples_are_told_by_source() -> None:
    bad = tuple(range(0, 100, 4))
    mixed = numbers(
        counted(100, 0, (1,), name="web"),
        counted(100, 1000, bad, name="code"),
        order={"shuffle": "none"},
        errors={"on_bad_sample": "skip", "max_bad_samples": 9},
    )
    with (
        loaderkit.build(mixed) as loader,
        pytest.raises(TooManyBadSamplesError, match=r"were bad \(9 of code, 1 of web\)"),
    ):
        list(loader)


def bad_x(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] == 1003:
        raise ValueError("not this one")
    return sample


def test_a_bad_sample_of_a_common_stage_names_its_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, quarantine = tmp_path / "p.json", tmp_path / "bad.jsonl"
    mixed = numbers(
        counted(20, name="web"),
        counted(20, 1000, name="code"),
        errors={"on_bad_sample": "skip", "quarantine": str(quarantine)},
    )
    mixed["stages"].insert(1, {"call": {"function": "test_source_accounts:bad_x"}})
    pipeline.write_text(json.dumps(mixed))
    with loaderkit.build(pipeline) as loader:
        list(loader)
        assert {name: row.num_bad for name, row in rows_of(loader).items()} == {"web": 0, "code": 1}
    (line,) = map(json.loads, quarantine.read_text().splitlines())
    assert (line["mixed"], line["source"], line["key"], line["stage"]) == ("code", "code: Counted", "3", "call")
    assert "call failed for sample '3' in code: Counted" in caplog.text
    assert main(["run", str(pipeline), "--only-quarantined", str(quarantine)]) == 1
    assert "bad   code: 3 (epoch 0)" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ packed documents


class Documents:
    """Document i has 1 to 90 tokens, all of them `token`; those in `bad` have become unreadable."""

    bad: frozenset[tuple[int, int]] = frozenset()

    def __init__(self, token: int, num: int) -> None:
        self.token = token
        self.lengths = np.random.default_rng(token).integers(1, 90, num)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if (self.token, index) in self.bad:
            raise ValueError("it has become unreadable")
        return {"tokens": np.full(self.lengths[index], self.token, np.int32)}


def mixed_documents(by: str, policy: str, **more: Any) -> dict[str, Any]:
    made = {"kind": "dataset", "object": "test_source_accounts:Documents"}
    return {
        "sources": [
            {"name": "web", "weight": 0.6, **made, "args": {"token": 1, "num": 70}},
            {"name": "code", "weight": 0.4, **made, "args": {"token": 2, "num": 40}, "epochs": 2},
        ],
        "mix": {"stop": "all", "by": by},
        "stages": ["read", {"pack": {"length": 64, "window": 30}}, {"batch": {"size": 4}}],
        "errors": {"on_bad_sample": policy},
        **more,
    }


def begun(batch: dict[str, Any]) -> Counter[int]:
    """The documents that begin in a batch, by their token. A key ends with [first:end] where only these tokens are here."""
    found, slot, number = Counter[int](), -1, 0
    ids, documents = batch["input_ids"].reshape(-1).tolist(), batch["document_ids"].reshape(-1).tolist()
    for begin in batch["cu_seqlens"].tolist()[:-1]:
        if begin % 64 == 0:
            slot, number = slot + 1, 0
        keys = batch["__key__"][slot].split(" ")
        if documents[begin] >= 0 and ("[" not in keys[number] or "[0:" in keys[number]):
            found[ids[begin]] += 1
        number += 1
    return found


@pytest.mark.parametrize("by", ["sample", "tokens"])
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_documents_and_tokens_of_packed_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, by: str
) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    pipeline = tmp_path / "p.json"
    pipeline.write_text(json.dumps(mixed_documents(by, policy)))
    assert main(["index", "--lengths", str(pipeline)]) == 0
    if policy != "raise":
        monkeypatch.setattr(Documents, "bad", frozenset({(1, 5), (1, 40), (2, 7)}))
    for executor in ("inline", "thread"):
        tokens, documents = Counter[int](), Counter[int]()
        with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
            passes = [(0.0, 0.0)]
            for batch in loader:
                tokens.update(batch["input_ids"][batch["document_ids"] >= 0].tolist())
                documents.update(begun(batch))
                web, code = loader.stats().source_rows()
                passes.append((web.num_passes, code.num_passes))
                assert (web.num_tokens, code.num_tokens) == (tokens[1], tokens[2])
                assert (web.num_samples, code.num_samples) == (documents[1], documents[2])
        assert passes == sorted(passes)
        assert (passes[-1], web.is_used_up, code.is_used_up) == ((1, 2), True, True)
        given, unit = (documents, "samples") if by == "sample" else (tokens, "tokens")
        assert (web.share, web.share_of) == (given[1] / given.total(), unit)
        if policy == "raise":
            assert documents == {1: 70, 2: 80}
            assert web.weight == pytest.approx(web.share, abs=0.01 if by == "sample" else 0.1)
        elif policy == "skip":
            assert (web.num_skipped, code.num_skipped) == (2, 2), "those of code in each of its passes"
        else:
            assert web.num_replaced + code.num_replaced > 0
        assert (web.num_bad, code.num_bad) == ((0, 0) if policy == "raise" else (2, 1))


@pytest.mark.parametrize(("executor", "stop"), [("inline", "all"), ("thread", "never"), ("process", "never")])
def test_tokens_of_samples_that_are_not_packed(tmp_path: Path, executor: str, stop: str) -> None:
    """Weights are shares of tokens, also where they change and over epochs."""
    files = [
        write_megatron(tmp_path / name, random_documents(np.random.default_rng(number), num, 30), "uint16")
        for number, (name, num) in enumerate({"web": 70, "code": 40}.items())
    ]
    mixed = {
        "sources": [
            {"name": "web", "weight": 0.6, "kind": "tokens", "url": str(files[0])},
            {"name": "code", "weight": 0.4, "kind": "tokens", "url": str(files[1])},
        ],
        "mix": {"by": "tokens", "stop": stop, "changes": [{"at": 30, "weights": {"web": 0.2, "code": 0.8}}]},
        "stages": ["read", {"batch": {"size": 4, "ragged": {"tokens": "list"}}}],
        "prefetch": {"executor": executor},
    }
    seen, tokens = Counter[int](), Counter[int]()
    with loaderkit.build(mixed) as loader:
        for _, batch in zip(range(55), (batch for _ in range(2) for batch in loader), strict=False):
            for source, values in zip(batch["__source__"].tolist(), batch["tokens"], strict=True):
                seen[source] += 1
                tokens[source] += len(values)
            web, code = loader.stats().source_rows()
            assert (web.num_tokens, code.num_tokens) == (tokens[0], tokens[1])
            assert (web.num_samples, code.num_samples) == (seen[0], seen[1])
            assert (web.num_passes, code.num_passes) == (seen[0] / 70, seen[1] / 40)
            num = seen.total()
            if stop == "never":
                assert web.weight == pytest.approx((0.6 * min(num, 30) + 0.2 * max(0, num - 30)) / num)
                assert not web.is_used_up
            assert web.share == pytest.approx(tokens[0] / tokens.total())
    assert seen.total() >= 216
