"""Damaged and missing shards are left out: the samples, their order and their states are those of the shards that are whole."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from damaged_shards import DAMAGES, KINDS, Kind, Rows, cut, remove, tar_shard
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

import loaderkit
from loaderkit.cli import main
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, SourceError, StateError, TooManyBadShardsError
from loaderkit.pipeline.ranks import same_shards
from loaderkit.sources.formats.tar_index import scan_tar

SKIP = {"on_bad_shard": "skip", "max_bad_shards": 3}


@pytest.fixture(autouse=True)
def _own_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))


class Shards:
    """Five shards in a folder, and the rows that each has."""

    def __init__(self, kind: str, folder: Path, rng: random.Random) -> None:
        self.kind: Kind = KINDS[kind]
        self.folder = folder
        folder.mkdir()
        counts = [rng.randint(3, 9) for _ in range(5)]
        firsts = [sum(counts[:number]) for number in range(5)]
        self.rows: list[Rows] = [list(range(first, first + num)) for first, num in zip(firsts, counts, strict=True)]
        for number, rows in enumerate(self.rows):
            self.path(number).write_bytes(self.kind.write(rows).data)
            self.kind.beside(self.path(number), rows)

    def path(self, number: int) -> Path:
        return self.folder / f"{number}.{self.kind.extension}"

    def pipeline(self, *, errors: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        source = {**self.kind.source, "url": str(self.folder), "include": f"{{0..4}}.{self.kind.extension}"}
        return {
            "source": {**source, **more.pop("source", {})},
            "stages": ["read", *self.kind.stages, {"batch": {"size": 3}}],
            "order": {"seed": 5, "epochs": 2, **more.pop("order", {})},
            "errors": errors or {},
            **more,
        }


def given(described: Mapping[str, Any], rank: int = 0, world_size: int = 1, state: Any = None) -> list[Any]:
    """The rows of every batch of the epochs that are left, and the state behind it."""
    found = []
    with loaderkit.build(described, rank=rank, world_size=world_size) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for _ in range(2):
            found += [
                (np.asarray(one["cls"]).tolist(), one["__key__"], json.dumps(loader.state_dict())) for one in loader
            ]
    return found


def without_states(found: list[Any]) -> list[Any]:
    return [(rows, keys) for rows, keys, _ in found]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_of_what_is_left(kind: str, damage: Any, tmp_path: Path, rng: random.Random) -> None:
    if kind == "lines" and damage is cut:
        pytest.skip("a file of lines that is cut has a bad sample, its last line")
    shards = Shards(kind, tmp_path / "damaged", rng)
    whole = Shards(kind, tmp_path / "whole", random.Random(1))
    bad = sorted(rng.sample(range(5), 2))
    left = [damage(shards.kind, rows, shards.path(n), rng) if n in bad else rows for n, rows in enumerate(shards.rows)]
    for number, rows in enumerate(left):
        whole.path(number).unlink()
        if rows:
            whole.path(number).write_bytes(whole.kind.write(rows).data)
            whole.kind.beside(whole.path(number), rows)
    shuffle = rng.choice(["global", "none", {"shuffle": "block", "block": {"block": 400, "window": 2, "lanes": 2}}])
    order = shuffle if isinstance(shuffle, dict) else {"shuffle": shuffle}
    described = shards.pipeline(errors=SKIP, order=order)
    reference = whole.pipeline(order=order, source={"include": f"*.{whole.kind.extension}"})
    for world_size in (1, 2):
        for rank in range(world_size):
            found = given(described, rank, world_size)
            assert without_states(found) == without_states(given(reference, rank, world_size))
    number = rng.randrange(len(found) - 1)
    rest = given(described, rank, world_size, state=found[number][2])
    assert without_states(rest) == without_states(found[number + 1 :])
    with loaderkit.build(described) as loader:
        said = loader.stats().to_dict()["bad_shards"]
        assert len(said) == 2
        for one, text in zip(bad, said, strict=True):
            assert text.startswith(f"{one}.{shards.kind.extension}: ")
            assert (f"({len(left[one])} samples before that stay)" in text) == bool(left[one])


@pytest.mark.parametrize("kind", KINDS)
def test_raising_is_the_default_and_names_the_option(kind: str, tmp_path: Path, rng: random.Random) -> None:
    # Of Parquet files the begin is looked at to leave out bad ones only, and of lines a cut is a bad sample.
    damages = {"parquet": [cut, remove], "tokens-parquet": [cut, remove], "lines": DAMAGES[1:]}.get(kind, DAMAGES)
    for damage in damages:
        shards = Shards(kind, tmp_path / damage.__name__, rng)
        damage(shards.kind, shards.rows[2], shards.path(2), rng)
        with pytest.raises((FormatError, SourceError), match=rf"2\.({shards.kind.extension}|idx).*on_bad_shard: skip"):
            loaderkit.build(shards.pipeline())


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_are_all_named(kind: str, tmp_path: Path, rng: random.Random) -> None:
    shards = Shards(kind, tmp_path / "data", rng)
    bad = sorted(rng.sample(range(5), 3))
    for number, damage in zip(bad, rng.choices(DAMAGES[1:], k=3), strict=True):
        damage(shards.kind, shards.rows[number], shards.path(number), rng)
    with pytest.raises(TooManyBadShardsError, match=r"3 shards .*errors\.max_bad_shards = 1") as caught:
        loaderkit.build(shards.pipeline(errors={"on_bad_shard": "skip"}))
    for number in range(5):
        assert (f"{number}.{shards.kind.extension}:" in str(caught.value)) == (number in bad)


def test_all_bad_is_no_data_set(tmp_path: Path, rng: random.Random) -> None:
    for kind in KINDS:
        shards = Shards(kind, tmp_path / kind, rng)
        for number in range(5):
            remove(shards.kind, [], shards.path(number), rng)
        with pytest.raises(SourceError, match=r"no sample is left .*0\..*4\."):
            loaderkit.build(shards.pipeline(errors={**SKIP, "max_bad_shards": 5}))


def test_what_may_work_again_is_an_error(tmp_path: Path, rng: random.Random) -> None:
    """A rank that asks later would have that shard."""

    class Refusing(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            if key.startswith("3"):
                raise loaderkit.errors.ThrottledError("slow down")
            super().read_into(key, start, buffer, etag=etag)

    for kind in KINDS:
        shards = Shards(kind, tmp_path / kind, rng)
        described = shards.pipeline(errors=SKIP, source={"url": "mine://x"})
        with pytest.raises(LoaderkitError, match="slow down"):
            loaderkit.build(described, connectors={"mine": Refusing(shards.folder)})


# ------------------------------------------------------------------------------------------------------------ states


def test_a_shard_that_is_mended_is_refused_by_name(tmp_path: Path, rng: random.Random) -> None:
    for kind in KINDS:
        shards = Shards(kind, tmp_path / kind, rng)
        remove(shards.kind, [], shards.path(1), rng)
        described = shards.pipeline(errors=SKIP)
        found = given(described)
        state = found[1][2]
        other = shards.pipeline(source={"include": [f"{number}.{shards.kind.extension}" for number in (0, 2, 3, 4)]})
        assert without_states(given(other, state=state)) == without_states(found[2:])  # the same samples
        shards.path(1).write_bytes(shards.kind.write(shards.rows[1]).data)
        with pytest.raises(
            StateError, match=rf"bad_shards: the state has 1\.{shards.kind.extension}, this loader nothing"
        ):
            given(described, state=state)
        remove(shards.kind, [], shards.path(4), rng)
        with pytest.raises(StateError, match=rf"this loader 4\.{shards.kind.extension}; data: "):
            given(described, state=state)


def test_other_samples_that_stay_are_refused(tmp_path: Path, rng: random.Random) -> None:
    shards = Shards("tar", tmp_path / "data", rng)
    written = tar_shard(shards.rows[0])
    states: list[Any] = []
    for number in (1, 2):
        shards.path(0).write_bytes(written.data[: written.ends[number] + 600])
        states += given(shards.pipeline(errors=SKIP), state=states[0][2] if number == 1 and states else None)[:1]
    with pytest.raises(StateError, match=r"the state has 0\.tar from sample 2 on, this loader 0\.tar from sample 3 on"):
        given(shards.pipeline(errors=SKIP), state=states[0][2])


# --------------------------------------------------------------------------------------------------------- the index


def test_a_sample_that_lost_a_member_is_left_out(tmp_path: Path, rng: random.Random) -> None:
    """Where the damaged member's name is not known, the last sample stays if it has what the one before it has."""
    rows = list(range(rng.randint(2, 6)))
    written = tar_shard(rows)
    connector = FileConnector(tmp_path)
    for _ in range(40):
        at = rng.randrange(512, len(written.data))
        at -= rng.choice([0, at % 512])
        (tmp_path / "x.tar").write_bytes(written.data[:at])
        whole = [row for row, end in zip(rows, written.ends, strict=True) if end <= at]
        has_end = at >= -(-written.ends[-1] // 512) * 512 + 512
        index = scan_tar(connector, connector.stat("x.tar"), up_to_damage=True)
        assert (index.damage is None) == has_end
        described = {
            "source": {
                "kind": "tar",
                "url": str(tmp_path),
                **({} if len(whole) > 1 else {"fields": {"data": "bin", "cls": "cls"}}),
            },
            "stages": ["read", "decode", {"batch": {"size": 1}}],
            "errors": SKIP,
        }
        if not whole:
            with pytest.raises(SourceError, match="no sample is left"):
                loaderkit.build(described)
            continue
        with loaderkit.build(described) as loader:
            assert loader.num_samples == len(whole)
            assert len(loader.stats().bad_shards) == (not has_end)


def test_an_array_that_is_cut_keeps_its_whole_records(tmp_path: Path, rng: random.Random) -> None:
    values = np.arange(rng.randint(3, 20) * 4, dtype=np.int32).reshape(-1, 4)
    np.save(tmp_path / "x.npy", values)
    values.tofile(tmp_path / "x.bin")
    for name, more in (("x.npy", {}), ("x.bin", {"dtype": "int32", "shape": [4]})):
        data = (tmp_path / name).read_bytes()
        num = rng.randrange(1, len(values))
        (tmp_path / name).write_bytes(data[: len(data) - values.nbytes + 16 * num + rng.randrange(1, 16)])
        described: dict[str, Any] = {
            "source": {"kind": "array", "url": str(tmp_path / name), **more},
            "stages": ["read", {"batch": {"size": 3}}],
            "order": {"shuffle": "none", "epochs": 1},
        }
        with pytest.raises(FormatError, match=r"truncated.*on_bad_shard: skip"):
            loaderkit.build(described)
        with loaderkit.build({**described, "errors": SKIP}) as loader:
            found = np.concatenate([batch["data"].numpy() for batch in loader])
            assert found.tolist() == values[:num].tolist()
            assert f"({num} samples before" in loader.stats().bad_shards[0]


def test_files_of_tokens_that_nothing_can_be_known_of(tmp_path: Path, rng: random.Random) -> None:
    """One without its index, one that is empty, one that ends before its first document; and the only one there is."""
    for kind, name, spoil in (
        ("tokens", "no-index", lambda path: path.with_suffix(".idx").unlink()),
        ("tokens", "empty", lambda path: path.write_bytes(b"")),
        ("tokens-npy", "no-end", lambda path: np.save(path, np.full(9, 5, np.int32))),
    ):
        shards = Shards(kind, tmp_path / name, rng)
        bad = rng.randrange(5)
        spoil(shards.path(bad))
        found = [row for rows, _, _ in given(shards.pipeline(errors=SKIP, order={"shuffle": "none"})) for row in rows]
        left = [row for number, rows in enumerate(shards.rows) for row in rows if number != bad]
        assert [row[0] - 1 for row in found] == 2 * left
        with pytest.raises((ConfigError, SourceError)):
            loaderkit.build(shards.pipeline())
        only = shards.pipeline(errors=SKIP, source={"url": str(shards.path(bad)), "include": None})
        with pytest.raises((ConfigError, SourceError)):
            loaderkit.build(only)


def test_a_folder_of_datasets_that_is_not_whole(tmp_path: Path, rng: random.Random) -> None:
    shards = Shards("tokens-arrow", tmp_path / "data", rng)
    names = [shards.path(number).name for number in range(5)]
    (shards.folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    shards.path(1).unlink()
    with pytest.raises(SourceError, match=r"1\.arrow.*which is not there.*on_bad_shard: skip"):
        loaderkit.build(shards.pipeline(source={"include": None}))
    with loaderkit.build(shards.pipeline(source={"include": None}, errors=SKIP)) as loader:
        assert loader.num_samples == sum(len(rows) for number, rows in enumerate(shards.rows) if number != 1)
        assert [text.partition(":")[0] for text in loader.stats().bad_shards] == ["1.arrow"]


def test_lists_of_tokens_that_cannot_be_decoded(tmp_path: Path, rng: random.Random) -> None:
    """They are decoded when the source is opened, for their lengths, so they are found out there."""
    shards = Shards("tokens-parquet", tmp_path / "data", rng)
    data = bytearray(shards.path(3).read_bytes())
    data[4:60] = bytes(56)  # the first page
    shards.path(3).write_bytes(data)
    with pytest.raises(FormatError, match=r"3\.parquet(?s:.*)on_bad_shard: skip"):
        loaderkit.build(shards.pipeline())
    left = [row for number, rows in enumerate(shards.rows) for row in rows if number != 3]
    for _ in range(2):
        found = [row for rows, _, _ in given(shards.pipeline(errors=SKIP, order={"shuffle": "none"})) for row in rows]
        assert [row[0] - 1 for row in found] == 2 * left


def test_of_mixed_sources_each_names_its_own(tmp_path: Path, rng: random.Random) -> None:
    web, code = (Shards(kind, tmp_path / kind, rng) for kind in ("parquet", "lines"))
    for shards in (web, code):
        remove(shards.kind, [], shards.path(3), rng)
    sources = [{"name": one.kind.extension, **one.pipeline()["source"], "weight": 1} for one in (web, code)]
    described = {
        "sources": sources,
        "stages": ["read", {"batch": {"size": 2}}],
        "errors": {**SKIP, "quarantine": str(tmp_path / "bad.jsonl")},
    }
    with loaderkit.build(described, rank=0, world_size=2) as loader:
        state = loader.state_dict()
        assert dict(state["fingerprint"])["bad_shards"] == "parquet: 3.parquet, jsonl: 3.jsonl"
        assert [text.partition(": it")[0] for text in loader.stats().bad_shards] == [
            "parquet: 3.parquet",
            "jsonl: 3.jsonl",
        ]
        next(iter(loader))
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(line["mixed"], line["shard"]) for line in lines] == [("parquet", "3.parquet"), ("jsonl", "3.jsonl")]
    with pytest.raises(TooManyBadShardsError, match=r"parquet: 3\.parquet: .*; jsonl: 3\.jsonl: "):
        loaderkit.build({**described, "errors": {"on_bad_shard": "skip"}})


# --------------------------------------------------------------------------------------------------------- who hears


def test_named_in_the_log_and_in_the_quarantine(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = Shards("tar", tmp_path / "data", rng)
    left = cut(shards.kind, shards.rows[2], shards.path(2), rng)
    quarantine = tmp_path / "bad.jsonl"
    described = shards.pipeline(errors={**SKIP, "quarantine": str(quarantine)})
    with caplog.at_level(logging.WARNING, "loaderkit"):
        for rank in (1, 0):
            assert given(described, rank, 2)
            assert quarantine.exists() == (rank == 0)  # both ranks have found it
    assert [record.message.startswith("bad shard (skip): 2.tar: ") for record in caplog.records] == [True, True]
    (line,) = map(json.loads, quarantine.read_text().splitlines())
    assert (line["shard"], line["source"], line["num_kept"]) == ("2.tar", str(shards.path(2)), len(left))
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(described))
    assert main(["run", str(path), "--only-quarantined", str(quarantine)]) == 1
    assert "bad   shard 2.tar: " in capsys.readouterr().out
    shards.path(2).write_bytes(shards.kind.write(shards.rows[2]).data)
    assert main(["run", str(path), "--only-quarantined", str(quarantine)]) == 0
    assert "good  shard 2.tar\n" in capsys.readouterr().out


def test_check_names_shards_and_samples_that_lack_fields(
    tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = Shards("tar", tmp_path / "data", rng)
    lack = sorted(rng.sample(range(5), 2))
    keys = []
    for number in lack:
        data = bytearray(shards.path(number).read_bytes())
        row = rng.choice(shards.rows[number])
        at = data.index(f"{row:04}.cls".encode())
        data[at + 5 : at + 8] = b"txt"
        # The sum of a header's bytes is its checksum.
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = f"{sum(data[at : at + 512]):06o}\0 ".encode()
        shards.path(number).write_bytes(data)
        keys.append(f"{row:04}")
    (gone,) = rng.sample(sorted({*range(5)} - {*lack}), 1)
    shards.path(gone).unlink()
    described = shards.pipeline(errors={**SKIP, "on_bad_sample": "skip"})
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(described))
    assert main(["check", str(path), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert [(one["field"], one["num"], one["keys"]) for one in checked["lacking"]] == [("cls", 2, keys)]
    assert [one["key"] for one in checked["bad_shards"]] == [f"{gone}.tar"]
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"2 of {checked['num_listed']} samples have no cls: {keys[0]}, {keys[1]}, from {lack[0]}.tar" in said
    assert f"bad shard     {gone}.tar: " in said


# ------------------------------------------------------------------------------------------------------------- ranks


def test_ranks_that_leave_out_others_are_refused(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a copy is damaged on one node."""
    shards = Shards("lines", tmp_path / "data", rng)
    described, ranks = shards.pipeline(errors=SKIP), iter(range(9))
    monkeypatch.setattr(same_shards, "default_store", lambda: FileStore(str(tmp_path / "store"), 3))
    monkeypatch.setattr(same_shards, "own_connection", lambda store, prefix: PrefixStore(prefix, store))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: next(ranks))
    for rank in range(2):
        assert given(described, rank, 3)
    shards.path(1).unlink()
    with pytest.raises(SourceError, match=r"rank 2 leaves out 1\.jsonl, and rank 0 no shard"):
        given(described, 2, 3)
