"""A kept listing is what a fresh one would be, or is not used."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import loaderkit
from loaderkit._internal.kept import folder_marks
from loaderkit._internal.kept.arrays import load_arrays, save_arrays
from loaderkit._internal.kept.folder_marks import CannotTellError, FolderMarks, TooYoungError, file_system_of
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, SourceError
from loaderkit.pipeline.ranks import same_shards
from loaderkit.sources.files.source import FilesArgs, FilesSource

OLD_S = 10.0


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, on a file system that tells, and a clock that is far behind every change."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_marks, "file_system_of", lambda path, mounts: "ext4")
    monkeypatch.setattr("loaderkit._internal.kept.folder_marks.time.time", lambda: 4e9)


class Counting(FileConnector):
    """Counts its listings, which must not make it one of another kind."""

    num_listed = 0

    def local_path(self) -> str | None:
        return self._root

    def list(self, prefix: str) -> Any:
        Counting.num_listed += 1
        return super().list(prefix)


def opened(root: Path, listing: Any = "keep", **args: Any) -> tuple[FilesSource, bool]:
    """The source, and whether it was listed."""
    before = Counting.num_listed
    described = {"url": str(root), "listing": listing, **args}
    source = FilesSource(Counting(root), FilesArgs.model_validate(described))
    return source, Counting.num_listed > before


def told(source: FilesSource) -> Any:
    """All that a source says of its samples."""
    indices = np.arange(len(source))
    table = source.table(indices)
    return (
        source.keys(indices),
        [source.key(index) for index in indices.tolist()],
        [source.ranges(index) for index in indices.tolist()],
        None if table is None else (table.fields, table.ranges, table.constants),
        source.classes,
        None if source.labels is None else (source.labels.dtype, source.labels.tolist()),
        source.fingerprint(),
        source.left_out,
        source.num_of_systems,
        source.oddities(),
        [*source.lacking()],
        source.blocks(7).tolist(),
    )


def drawn_tree(root: Path, rng: random.Random, extensions: list[str]) -> None:
    for number in range(rng.randint(3, 40)):
        folder = root / rng.choice(["a", "a-b", "b", "a/c", "d\udce9", ".hidden", "@eaDir"])
        folder.mkdir(parents=True, exist_ok=True)
        data = bytes(rng.randrange(30))
        (folder / f"{number}{rng.choice(extensions)}").write_bytes(data)


KINDS: dict[str, dict[str, Any]] = {
    "images": {},
    "globs": {"include": "**/*.jpg"},
    "labels": {"include": "**/*.*", "label": "top"},
    "given": {"include": "**/*.jpg", "label": "top", "classes": {"a": 3, "a-b": 1, "b": 1, "d\udce9": 0}},
    "limit": {"include": "**/*.jpg", "label": "top", "limit": 3},
    "fields": {"fields": {"image": "a*/**/*.jpg", "mask": "a*/**/*.png"}, "optional": ["mask"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_a_fresh_listing_is(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    for number in range(6):
        root = tmp_path / str(number) / "data"  # its folders would be compared with those of folders beside it
        (root / "a").mkdir(parents=True)
        (root / "a" / "first.jpg").write_bytes(b"1")
        drawn_tree(root, rng, [".jpg"] if kind != "images" else [".jpg", ".jpg", ".jpg", ".txt", ""])
        args = KINDS[kind]
        fresh, _ = opened(root, "fresh", **args)
        first, is_listed = opened(root, **args)
        assert is_listed
        again, is_listed = opened(root, **args)
        assert not is_listed
        assert told(fresh) == told(first) == told(again) == told(pickle.loads(pickle.dumps(again)))


def test_a_table_of_labels_is_read_at_every_start(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for number in range(5):
        (root / f"{number}.jpg").write_bytes(bytes(number))
    for text in ("name,y\n0.jpg,4\n3.jpg,2\n", "name,y\n1.jpg,4\n3.jpg,2\n4.jpg,7\n"):
        args = {"labels": {"file": "labels.csv", "key": "name", "value": "y", "unmatched": "skip"}}
        (root / "labels.csv").write_text(text)
        source, _ = opened(root, include="*.jpg", **args)
        fresh, _ = opened(root, "fresh", include="*.jpg", **args)
        assert told(source) == told(fresh)
        assert len(source) == text.count(".jpg")


CHANGES: dict[str, Any] = {
    "added": lambda root: (root / "a" / "new.jpg").write_bytes(b"x"),
    "removed": lambda root: (root / "a" / "0.jpg").unlink(),
    "renamed": lambda root: (root / "a" / "0.jpg").rename(root / "a" / "z.jpg"),
    "replaced": lambda root: ((root / "new").write_bytes(b"xyz"), (root / "new").rename(root / "a" / "0.jpg")),
    "folder": lambda root: ((root / "b").mkdir(), (root / "b" / "0.jpg").write_bytes(b"x")),
    "other folder": lambda root: (
        (root / "a").rename(root.parent / "gone"),
        (root / "a").mkdir(),
        (root / "a" / "0.jpg").write_bytes(b"x"),
    ),
    "link": lambda root: ((root / "linked").unlink(), (root / "linked").symlink_to(root.parent / "other")),
}


def one_file(root: Path) -> None:
    (root / "a" / "0.jpg").write_bytes(b"x")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_folder_is_seen(tmp_path: Path, change: str) -> None:
    root = tmp_path / "data"
    for folder in (root / "a", tmp_path / "others", tmp_path / "other"):
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"{number}.jpg").write_bytes(bytes(number))
    (tmp_path / "other" / "more.jpg").write_bytes(b"x")
    (root / "linked").symlink_to(tmp_path / "others")
    opened(root)
    assert not opened(root)[1]
    CHANGES[change](root)
    source, is_listed = opened(root)
    assert is_listed
    assert told(source) == told(opened(root, "fresh")[0])


def test_what_changes_while_it_is_listed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    one_file(root)

    def listed(self: FilesSource) -> Any:
        found = real(self)
        (root / "a" / "late.jpg").write_bytes(b"x")
        return found

    real = FilesSource._list
    monkeypatch.setattr(FilesSource, "_list", listed)
    assert len(opened(root)[0]) == 1
    monkeypatch.undo()
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    assert len(opened(root)[0]) == 2


def test_a_folder_that_was_changed_a_moment_ago_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "data" / "a"
    one.mkdir(parents=True)
    one_file(tmp_path / "data")
    changed_s = one.stat().st_mtime
    monkeypatch.setattr("loaderkit._internal.kept.folder_marks.time.time", lambda: changed_s + 0.01)
    with pytest.raises(TooYoungError, match="a moment ago"):
        FolderMarks.take(str(one))
    assert opened(tmp_path / "data")[1]
    assert opened(tmp_path / "data")[1]
    monkeypatch.setattr("loaderkit._internal.kept.folder_marks.time.time", lambda: changed_s + OLD_S)
    assert opened(tmp_path / "data")[1]
    assert not opened(tmp_path / "data")[1]


# ------------------------------------------------------------------------------------------------ files that change


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_file_that_was_written_over_ends_the_run_and_the_listing(tmp_path: Path, executor: str) -> None:
    """No folder tells of it. With `skip` it would else be left out at every start."""
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    for number in range(9):
        (root / "a" / f"{number}.bin").write_bytes(bytes([number] * 5))
    described = {
        "source": {"kind": "files", "url": str(root), "include": "**/*.bin", "listing": "keep"},
        "stages": ["read", {"batch": {"size": 3}}],
        "errors": {"on_bad_sample": "skip"},
        "prefetch": {"executor": executor},
    }
    with loaderkit.build(described) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 9
    (root / "a" / "4.bin").write_bytes(b"others")
    with loaderkit.build(described) as loader, pytest.raises(SourceError, match=r"is out of date\. It was removed"):
        list(loader)
    with loaderkit.build(described) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 9


# -------------------------------------------------------------------------------------------------- what is damaged


def test_damage_is_seen_and_listed_again(tmp_path: Path, rng: random.Random) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    for number in range(20):
        (root / "a" / f"{number}.jpg").write_bytes(bytes(number))
    fresh = told(opened(root, "fresh")[0])
    opened(root)
    (path,) = (tmp_path / "cache" / "listings").iterdir()
    whole = path.read_bytes()
    facts = whole.index(b'"facts"')  # what few of all bytes are
    for _ in range(120):
        data = bytearray(whole)
        at = rng.choice([rng.randrange(len(data)), rng.randrange(facts, facts + 100)])
        if rng.random() < 0.3:
            data = data[:at]
        else:
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert told(opened(root)[0]) == fresh
    path.write_bytes(b"")
    assert told(opened(root)[0]) == fresh


def test_arrays_are_those_that_were_saved(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(5),
        "b": np.arange(3, dtype=np.uint8),
        "none": np.zeros(0, np.int64),
        "c": np.arange(7, dtype=np.int32),
    }
    path = tmp_path / "folder" / "x.arrays"
    assert save_arrays(path, "me", {"n": [1, None]}, arrays)
    found = load_arrays(path, "me")
    assert found is not None
    facts, loaded = found
    assert facts == {"n": [1, None]}
    assert [(name, array.dtype, array.tolist()) for name, array in loaded.items()] == [
        (name, array.dtype, array.tolist()) for name, array in arrays.items()
    ]
    assert not any(array.flags.writeable for array in loaded.values())
    assert load_arrays(path, "another") is None
    assert load_arrays(tmp_path / "missing", "me") is None


# ------------------------------------------------------------------------------------------------------ what may be kept


def test_of_a_store_it_is_kept_for_as_long_as_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bucket(Counting):
        def local_path(self) -> str | None:
            return None

    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    one_file(root)
    now_s = [1e9]
    monkeypatch.setattr("loaderkit.sources.files.kept.time.time", lambda: now_s[0])

    def listed(listing: str) -> bool:
        before = Counting.num_listed
        FilesSource(Bucket(root), FilesArgs.model_validate({"url": "s3://bucket/x", "listing": listing}))
        return Counting.num_listed > before

    with pytest.raises(ConfigError, match=r"say for how long a listing is used, as in `listing: 1d`"):
        listed("keep")
    for age_s, is_listed in ((0, True), (3599, False), (3601, True), (3700, False), (-100, True)):
        now_s[0] = 1e9 + age_s
        assert listed("1h") == is_listed, age_s


def test_nothing_is_kept_of_memory_and_of_unknown_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = FilesArgs.model_validate({"url": "memory://x", "listing": "1d"})
    with pytest.raises(ConfigError, match="this process's memory"):
        FilesSource(MemoryConnector({"a.jpg": b"x"}), args)
    (tmp_path / "a").mkdir()
    one_file(tmp_path)
    monkeypatch.setattr(folder_marks, "file_system_of", lambda path, mounts: "fuse.mount-s3")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"of type fuse\.mount-s3.*as in `listing: 1d`"):
            assert opened(tmp_path)[1]
    assert opened(tmp_path, "1d")[1]
    monkeypatch.setattr("loaderkit.sources.files.kept.time.time", lambda: 4e9 + 60)
    assert not opened(tmp_path, "1d")[1]


def test_links_that_lead_nowhere_may_lead_somewhere_later(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jpg").symlink_to(tmp_path / "later.jpg")
    with pytest.raises(CannotTellError, match="leads to no file"):
        FolderMarks.take(str(tmp_path / "data"))
    with socket.socket(socket.AF_UNIX) as pipe:
        here = os.getcwd()
        os.chdir(tmp_path)
        try:
            pipe.bind("later.jpg")
        finally:
            os.chdir(here)
        with pytest.raises(CannotTellError, match="leads to no file"):
            FolderMarks.take(str(tmp_path / "data"))


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert FolderMarks.take(str(tmp_path)).hold()


def test_the_type_of_a_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    inner = tmp_path / "with space"
    (inner / "deep").mkdir(parents=True)
    root = str(tmp_path.resolve())
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:5 / {root} rw shared:1 - xfs /dev/b rw\n"
        f"3 2 0:6 / {root}/with\\040space rw - tmpfs none rw\n"
        f"4 3 0:7 / {root}/with\\040space rw - fuse.s3fs none rw\n"
        "a line that is none\n"
    )
    assert file_system_of("/", mounts) == "ext4"
    assert file_system_of(root, mounts) == "xfs"
    assert file_system_of(str(inner / "deep"), mounts) == "fuse.s3fs"
    assert file_system_of(root, tmp_path / "missing") == ""
    assert file_system_of("/proc/self", Path("/proc/self/mountinfo")) in ("proc", "")


def test_ranks_whose_listings_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    for number in range(8):
        (root / "a" / f"{number}.bin").write_bytes(b"x")
    described = {
        "source": {"kind": "files", "url": str(root), "include": "**/*.bin", "listing": "1d"},
        "stages": ["read", {"batch": {"size": 2}}],
    }
    ranks = iter(range(9))
    monkeypatch.setattr(same_shards, "default_store", lambda: dist.FileStore(str(tmp_path / "store"), 3))  # type: ignore[attr-defined]
    monkeypatch.setattr(same_shards, "own_connection", lambda store, prefix: c10d.PrefixStore(prefix, store))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: next(ranks))
    for node in ("one", "one", "two"):
        if node == "two":
            (root / "a" / "new.bin").write_bytes(b"x")
        monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / node))
        loader = loaderkit.build(described, rank=0, world_size=2)
        if node == "two":
            with pytest.raises(SourceError, match="rank 2 has other samples than rank 0: listings were kept"):
                iter(loader)
        else:
            iter(loader)
        loader.close()


def test_a_pipeline_says_it_and_states_do_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one_file(tmp_path)
    pipeline = loaderkit.Pipeline.files(str(tmp_path), include="**/*.jpg", listing="12h").read().batch(1)
    assert "43200s" in pipeline.to_yaml()
    with loaderkit.build(pipeline) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    with loaderkit.build(pipeline, overrides={"source.listing": "fresh"}) as loader:
        loader.load_state_dict(state)
