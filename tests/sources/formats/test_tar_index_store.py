"""Indexes kept on this machine, and objects that change meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tar_archives import Recording, archive, by_tarfile

from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import ObjectInfo, writes_of
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.sources.formats.tar_index import (
    TarIndex,
    load_index,
    scan_tar,
)


def test_kept_index_is_used_until_the_object_changes(tmp_path: Path) -> None:
    first = archive([(f"{i}.jpg", b"x" * 600) for i in range(40)])
    connector = Recording({"s.tar": first})
    cold = load_index(connector, connector.stat("s.tar"), tmp_path)
    assert connector.reads
    connector.reads.clear()
    warm = load_index(connector, connector.stat("s.tar"), tmp_path)
    assert connector.reads == []
    assert list(warm) == list(cold) == by_tarfile(first)

    second = archive([(f"{i}.jpg", b"y" * 600) for i in range(39, -1, -1)])
    assert len(second) == len(first)
    writes_of(connector).put("s.tar", second)
    assert list(load_index(connector, connector.stat("s.tar"), tmp_path)) == by_tarfile(second)
    assert connector.reads
    assert not list(tmp_path.rglob("*.tmp"))


def test_damaged_copy_is_made_again(tmp_path: Path) -> None:
    data = archive([(f"{i}.jpg", b"x" * 600) for i in range(40)])
    connector = Recording({"s.tar": data})
    info = connector.stat("s.tar")
    load_index(connector, info, tmp_path)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    good = path.read_bytes()
    rng = random.Random(0)
    damaged = [b"", b"PK", good[:-30], good[: len(good) // 2], bytes(len(good))]
    for _ in range(40):
        place = rng.randrange(len(good))
        damaged.append(good[:place] + bytes([good[place] ^ 255]) + good[place + 1 :])
    for bad in damaged:
        path.write_bytes(bad)
        assert list(load_index(connector, info, tmp_path)) == by_tarfile(data)
    path.unlink()
    path.mkdir()
    assert list(load_index(connector, info, tmp_path)) == by_tarfile(data)


def test_nowhere_to_keep_it(tmp_path: Path) -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data})
    (tmp_path / "file").write_bytes(b"")
    for cache_dir in (None, tmp_path / "file", tmp_path / "file" / "below"):
        assert list(load_index(connector, connector.stat("s.tar"), cache_dir)) == by_tarfile(data)


def test_a_cut_archive_is_warned_about_every_time(tmp_path: Path) -> None:
    data = archive([("a.jpg", b"1"), ("b.jpg", b"2")], "ustar")[:2048]
    connector = MemoryConnector({"s.tar": data})
    for _ in range(2):
        with pytest.warns(UserWarning, match="may be truncated"):
            assert len(load_index(connector, connector.stat("s.tar"), tmp_path)) == 2


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADERKIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "loaderkit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/loaderkit")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", "/y/z")
    assert default_cache_dir() == Path("/y/z")


def test_index_refuses_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        TarIndex(np.array([512]), np.array([1]), b"a")
    with pytest.raises(IndexError):
        TarIndex(np.array([512]), np.array([1]), b"a\0")[1]


def test_an_object_replaced_while_scanning_is_noticed() -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data})
    info = connector.stat("s.tar")
    writes_of(connector).put("s.tar", data + bytes(512))
    with pytest.raises(OSError, match="was replaced"):
        scan_tar(connector, ObjectInfo(*info))
