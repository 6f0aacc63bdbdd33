"""Mixing by tokens from the pipeline to the batch: shares, whoever makes the batches, resume, world sizes, packing."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixtures import counted
from numpy.typing import NDArray
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit.cli import main
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StateError
from loaderkit.pipeline.execution_plan import compile_pipeline

Documents = list[NDArray[np.generic]]
SHARES = {"web": 0.6, "code": 0.3, "books": 0.1}
MEANS = {"web": 12.0, "code": 40.0, "books": 150.0}


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def corpora() -> dict[str, Documents]:
    rng = np.random.default_rng(11)
    return {name: random_documents(rng, 200, mean) for name, mean in MEANS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpora: dict[str, Documents]) -> Path:
    path = tmp_path_factory.mktemp("corpora")
    for name, documents in corpora.items():
        write_megatron(path / name, documents, "uint16")
    return path


def described(folder: Path, *, pack: dict[str, Any] | None = None, size: int = 4, **mix: Any) -> dict[str, Any]:
    sources = [
        {"name": name, "kind": "tokens", "url": str(folder / f"{name}.bin"), "weight": weight}
        for name, weight in SHARES.items()
    ]
    batch = {"size": size} if pack is not None else {"size": size, "ragged": {"tokens": "list"}}
    between = [{"pack": {"length": 64, "window": 40, "cost": "none", **pack}}] if pack is not None else []
    return {
        "sources": sources,
        "mix": {"by": "tokens", **mix},
        "order": {"seed": 3},
        "stages": ["read", *between, {"batch": batch}],
        "prefetch": {"executor": "inline"},
    }


def documents_of(loader: loaderkit.Loader, num_batches: int | None = None) -> list[tuple[Any, ...]]:
    """What comes: a document with its source, or with `pack` a sequence with its keys; wrapped ones left out."""
    found: list[tuple[Any, ...]] = []
    for number, batch in enumerate(loader, 1):
        wrapped = batch["__wrapped__"].tolist() if "__wrapped__" in batch else [False] * len(batch["__key__"])
        if "input_ids" in batch:
            rows = [tuple(row) for row in batch["input_ids"].tolist()]
            found += [(key, *row) for key, row, wraps in zip(batch["__key__"], rows, wrapped, strict=True) if not wraps]
        else:
            values = zip(batch["__source__"].tolist(), batch["__key__"], batch["tokens"], wrapped, strict=True)
            found += [(source, key, tuple(tokens.tolist())) for source, key, tokens, wraps in values if not wraps]
        if number == num_batches:
            break
    return found


def of_all_ranks(
    pipeline: dict[str, Any], world_size: int, state: dict[str, Any] | None, num_batches: int | None
) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """What all ranks give, by position, and the state behind it."""
    columns, states = [], []
    for rank in range(world_size):
        with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            columns.append(documents_of(loader, num_batches))
            states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    start = 0 if state is None else state["position"] % world_size
    columns = columns[start:] + columns[:start]
    longest = max(map(len, columns))
    return [column[row] for row in range(longest) for column in columns if row < len(column)], states[0]


class TestCourse:
    def test_each_source_has_its_share_of_tokens(self, folder: Path, corpora: dict[str, Documents]) -> None:
        with loaderkit.build(described(folder)) as loader:
            names = loader.sources or []
            num_samples = loader.num_samples
            found = documents_of(loader)
        assert len(found) == num_samples
        tokens = dict.fromkeys(names, 0)
        longest = max(len(document) for documents in corpora.values() for document in documents)
        for source, key, values in found:
            name = names[source]
            assert values == tuple(corpora[name][int(key)].tolist())
            tokens[name] += len(values)
            for other, share in SHARES.items():
                assert abs(tokens[other] - share * sum(tokens.values())) <= longest + 1e-6
        assert any(sum(source == number for source, _, _ in found) == 200 for number in range(3)), "one is used up"

    @pytest.mark.parametrize("stop", ["all", "never"])
    def test_epochs_and_no_end(self, folder: Path, stop: str) -> None:
        with loaderkit.build(described(folder, stop=stop)) as loader:
            if stop == "never":
                with pytest.raises(TypeError, match="stop: never"):
                    len(loader)
                assert len({key for source, key, _ in documents_of(loader, 300) if source == 0}) == 200
                return
            for _ in range(2):
                assert sorted((source, int(key)) for source, key, _ in documents_of(loader)) == [
                    (source, key) for source in range(3) for key in range(200)
                ]

    def test_epochs_have_ends_of_their_own(self, folder: Path) -> None:
        with loaderkit.build(described(folder)) as loader:
            sizes = []
            for _ in range(4):
                announced = loader.num_samples
                sizes.append(len(documents_of(loader)))
                assert announced == sizes[-1]
        assert len(set(sizes)) > 1

    @pytest.mark.parametrize(("pack", "executor"), [(None, "thread"), ({}, "thread"), ({}, "process")])
    def test_same_whoever_makes_them(self, folder: Path, pack: dict[str, Any] | None, executor: str) -> None:
        pipeline = described(folder, pack=pack)
        with loaderkit.build(pipeline) as loader:
            expected = documents_of(loader) + documents_of(loader)
        more = {"prefetch.executor": executor, "prefetch.processes": 2, "prefetch.batches": 4}
        with loaderkit.build(pipeline, overrides=more) as loader:
            assert documents_of(loader) + documents_of(loader) == expected

    def test_remote_sources_are_read_ahead(self, folder: Path) -> None:
        class Remote(MemoryConnector):
            traits = ConnectorTraits(is_remote=True)

        pipeline = described(folder, stop="all")
        with loaderkit.build(pipeline) as loader:
            expected = documents_of(loader)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        for entry in pipeline["sources"]:
            entry["url"] = f"far:///{entry['name']}.bin"
        more = {"prefetch.executor": "thread"}
        with loaderkit.build(pipeline, connectors={"far": Remote(files)}, overrides=more) as loader:
            assert documents_of(loader) == expected
            assert loader.stats().store["num_direct_reads"] <= 3, "the first samples, which show what a batch holds"


class TestResume:
    @pytest.mark.parametrize("pack", [None, {"split": "long"}])
    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
    def test_at_another_world_size(self, folder: Path, pack: dict[str, Any] | None, before: int, after: int) -> None:
        changes = [{"at": 70, "weights": {"web": 0.2, "code": 0.2, "books": 0.6}}]
        pipeline = described(folder, pack=pack, stop="all", changes=changes)
        with loaderkit.build(pipeline, rank=0, world_size=1) as loader:
            whole = documents_of(loader)
        first, state = of_all_ranks(pipeline, before, None, 5)
        assert len(json.dumps(state)) < 1024
        assert first == whole[: len(first)]
        rest, _ = of_all_ranks(pipeline, after, json.loads(json.dumps(state)), None)
        assert first + rest == whole

    def test_in_a_later_epoch(self, folder: Path) -> None:
        pipeline = described(folder)
        with loaderkit.build(pipeline) as loader:
            for _ in range(2):
                documents_of(loader)
            documents_of(loader, 6)
            state = loader.state_dict()
            assert state["epoch"] == 2
        with loaderkit.build(pipeline) as loader:
            loader.load_state_dict(state)
            rest = documents_of(loader) + documents_of(loader)
        with loaderkit.build(pipeline) as loader:
            loader.set_epoch(2)
            assert documents_of(loader)[24:] + documents_of(loader) == rest

    @pytest.mark.parametrize("pack", [None, {}])
    def test_a_later_change_of_weights_may_be_added(self, folder: Path, pack: dict[str, Any] | None) -> None:
        """Sequences are made of whole windows, so with `pack` a change inside the one at work is not later."""
        with loaderkit.build(described(folder, pack=pack, stop="all")) as loader:
            first = documents_of(loader, 3)
            state = loader.state_dict()
        assert (state["position"], len(first)) == (12, 12)

        def changed(at: int) -> dict[str, Any]:
            changes = [{"at": at, "weights": {"web": 1, "code": 0, "books": 0}}]
            return described(folder, pack=pack, stop="all", changes=changes)

        config = loaderkit.Pipeline(described(folder, pack=pack, stop="all")).config
        with closing(compile_pipeline(config, rank=0, world_size=1)) as plan:
            earliest = plan.order.positions_before(0, 12)
        assert earliest == 12 if pack is None else earliest % 40 == 0
        with loaderkit.build(changed(earliest)) as loader:
            loader.load_state_dict(state)
            rest = documents_of(loader)
        with loaderkit.build(changed(earliest)) as loader:
            assert documents_of(loader) == first + rest
        with loaderkit.build(changed(earliest - 1)) as loader, pytest.raises(StateError, match="mix: the state has"):
            loader.load_state_dict(state)

    @pytest.mark.parametrize("mix", [{"by": "sample"}, {"stop": "all"}])
    def test_another_way_to_mix_is_refused(self, folder: Path, mix: dict[str, Any]) -> None:
        with loaderkit.build(described(folder)) as loader:
            documents_of(loader, 3)
            state = loader.state_dict()
        with loaderkit.build(described(folder, **mix)) as loader, pytest.raises(StateError, match="mix: the state has"):
            loader.load_state_dict(state)


def test_a_state_of_twenty_sources_is_small(folder: Path) -> None:
    pipeline = described(folder, pack={}, stop="all", changes=[])
    entry = pipeline["sources"][0]
    pipeline["sources"] = [{**entry, "name": f"source-{number:02}", "weight": 1 + number / 7} for number in range(20)]
    with loaderkit.build(pipeline) as loader:
        documents_of(loader, 3)
        assert len(json.dumps(loader.state_dict())) < 1024


class TestLengths:
    def test_a_length_index_tells_them(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Tokenized by stages of their own, and mixed by what comes out."""
        for name, text in {"web": "ab " * 5, "code": "abcdef " * 9}.items():
            (tmp_path / name).mkdir()
            for number in range(20):
                (tmp_path / name / f"{number:02}.txt").write_text(text * (number % 5 + 1))
        (tmp_path / "p.yaml").write_text(
            f"""\
sources:
  - {{name: web, kind: files, url: {tmp_path}/web, include: "*.txt", fields: {{text: txt}}, weight: 0.5}}
  - {{name: code, kind: files, url: {tmp_path}/code, include: "*.txt", fields: {{text: txt}}, weight: 0.5}}
mix: {{by: tokens, stop: all}}
stages: [read, call: {{function: "token_files:tokenized"}}, pack: {{length: 32}}, batch: {{size: 4}}]
"""
        )
        with pytest.raises(ConfigError, match=r"mix\.by: tokens: stages\.pack: .* run `loaderkit index --lengths`"):
            loaderkit.build(tmp_path / "p.yaml")
        assert main(["index", "--lengths", str(tmp_path / "p.yaml")]) == 0
        with loaderkit.build(tmp_path / "p.yaml") as loader:
            assert sum(int((batch["document_ids"] >= 0).sum()) for batch in loader) == 20 * 3 * (15 + 63)
        capsys.readouterr()
        assert main(["explain", "--mix", str(tmp_path / "p.yaml"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["by"] == "tokens"
        rows = [segment["sources"] for segment in told["segments"]]
        assert sum(row["web"]["num_tokens"] for row in rows) == 20 * 3 * 15
        assert sum(row["code"]["num_samples"] for row in rows) == 20
        assert rows[0]["web"]["share"] == 0.5
        assert main(["explain", "--mix", str(tmp_path / "p.yaml")]) == 0
        assert "50.000 % of the tokens" in capsys.readouterr().out

    def test_where_they_are_not_known(self, folder: Path) -> None:
        pipeline = described(folder)
        pipeline["sources"].append(counted(20, name="more"))
        with pytest.raises(ConfigError, match="how many tokens a sample of more has is not known"):
            loaderkit.build(pipeline)


def sizes_of_epochs(folder: Path, seed: int) -> list[int]:
    with loaderkit.build(described(folder, stop="first", size=1), overrides={"order.seed": seed}) as loader:
        sizes = []
        for epoch in range(8):
            loader.set_epoch(epoch)
            next(iter(loader))
            sizes.append(len(loader))
        return sizes


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_an_epoch_without_a_batch_is_an_error(executor: str, folder: Path) -> None:
    """Epochs differ in length, so a later one may have none where the first has: no loop waits for it, or leaves it out."""
    seed, sizes = next(
        (seed, sizes) for seed in range(100) for sizes in [sizes_of_epochs(folder, seed)] if min(sizes[2:]) < sizes[0]
    )
    size = sizes[0]
    short = next(epoch for epoch, own in enumerate(sizes) if own < size)
    described_so = described(folder, stop="first")
    described_so["stages"][-1]["batch"] |= {"size": size, "drop_last": True}
    with loaderkit.build(described_so, overrides={"prefetch.executor": executor, "order.seed": seed}) as loader:
        for _ in range(short):
            assert len(list(loader)) == 1
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=f"epoch {short} has no batch at all, as epochs of this pipeline differ"
            ):
                list(loader)
        loader.set_epoch(0)
        assert len(list(loader)) == 1


def test_length_is_that_of_the_epoch_asked_for(folder: Path) -> None:
    """As of a DataLoader whose sampler has heard of the epoch; also after a loop that was broken off."""
    seed, sizes = next(
        (seed, sizes) for seed in range(100) for sizes in [sizes_of_epochs(folder, seed)] if len({*sizes[:5]}) == 5
    )
    described_so = described(folder, stop="first", size=1)
    with loaderkit.build(described_so, overrides={"order.seed": seed}) as loader:
        for epoch in (0, 2, 1, 4, 3):
            loader.set_epoch(epoch)
            assert len(loader) == len(loader.batch_sampler) == len(loader.dataset) == loader.num_samples == sizes[epoch]
            next(iter(loader))
            assert loader.epoch == epoch
            assert len(loader) == sizes[epoch]
        loader.set_epoch(4)
        assert len(loader) == sizes[4]
        assert loader.state_dict()["epoch"] == 3, "the loop has not gone there yet"
        assert len(list(loader)) == sizes[4]
        assert len(loader) == sizes[5]


def test_own_stages_are_not_seen_without_an_index(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    described_so = described(folder)
    described_so["sources"][0]["stages"] = [{"call": {"function": "builtins:dict"}}]
    with loaderkit.build(described_so):
        assert "samples of web count with the tokens that they have in the source" in caplog.text
