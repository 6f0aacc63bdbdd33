"""Where the samples of a file begin: kept, mapped, and never believed if it is damaged."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutate import OPERATORS
from mutate_formats import damaged

from loaderkit._internal.system import user_cache
from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConnectorError, FormatError
from loaderkit.sources.serial.lines import LinesArgs, LinesSource
from loaderkit.sources.serial.offsets import Parts, load_offsets, pack, parse

INFO = ObjectInfo("x.txt", 100, "etag")
STARTS = np.array([3, 10, 20, 100], np.int64)


def found() -> Parts:
    yield STARTS[:2], np.array([0])
    yield STARTS[2:], np.array([2])


def packed() -> bytes:
    file = io.BytesIO()
    pack(INFO, found(), b"t" * 16, file)
    return file.getvalue()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.offsets"
    whole = parse(packed(), INFO)
    for _ in range(2):
        offsets = load_offsets(INFO, path, found)
        assert (offsets.starts.tolist(), offsets.blanks.tolist()) == (STARTS.tolist(), [0, 2])
        assert offsets.digest == whole.digest
    for other in (INFO._replace(size=101), INFO._replace(etag="new")):
        starts = [0, other.size]
        parts = [(np.array(starts), np.zeros(0, np.int64))]
        assert load_offsets(other, path, partial(iter, parts)).starts.tolist() == starts
    assert [name.name for name in path.parent.iterdir()] == ["x.offsets"]
    assert load_offsets(INFO, None, found).path is None


def test_damaged_ones_are_refused_or_sound(rng: random.Random) -> None:
    numbers = np.random.default_rng(rng.getrandbits(64))
    whole = packed()
    for _ in range(500):
        data = damaged(whole, OPERATORS, numbers)
        try:
            offsets = parse(data, INFO, b"t" * 16)
        except FormatError:
            continue
        assert offsets.starts[-1] == INFO.size
        assert (np.diff(offsets.starts) > 0).all()
        assert ((offsets.blanks >= 0) & (offsets.blanks < len(offsets.starts) - 1)).all()


@pytest.mark.parametrize("call", ["write", "replace", "mkdir", "read-only"])
def test_a_full_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    if call == "write":
        monkeypatch.setattr(user_cache, "create_temporary", lambda path: Full(path, "xb"))
    elif call == "replace":
        monkeypatch.setattr(os, "replace", fail)
    elif call == "read-only":
        monkeypatch.setattr(os, "replace", fail)
        monkeypatch.setattr(Path, "unlink", fail)
    else:
        monkeypatch.setattr(Path, "mkdir", fail)

    class Full(io.FileIO):
        write = fail  # type: ignore[assignment]

    assert load_offsets(INFO, tmp_path / "a" / "x", found).starts.tolist() == STARTS.tolist()
    assert bool(list(tmp_path.rglob("*.tmp"))) == (call == "read-only")


def test_errors_of_the_store_come_through(tmp_path: Path) -> None:
    def fails() -> Parts:
        yield STARTS, np.zeros(0, np.int64)
        raise ConnectorError("gone")

    with pytest.raises(ConnectorError, match="gone"):
        load_offsets(INFO, tmp_path / "x", fails)
    assert not list(tmp_path.iterdir())


def test_large_ones_are_mapped_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "x.txt").write_bytes(b"ab\n" * 100_000)
    connector = FileConnector(tmp_path)
    source = LinesSource(connector, LinesArgs(url=str(tmp_path), format="text"))
    data = pickle.dumps(source)
    assert len(data) < 5000
    copies = [pickle.loads(data)]
    for kept in (tmp_path / "cache").rglob("*.offsets"):
        kept.unlink()  # as on another machine
    copies.append(pickle.loads(data))
    for copy in copies:
        assert copy.fingerprint() == source.fingerprint()
        assert copy.keys(np.array([0, 99_999])) == ["x.txt:1", "x.txt:100000"]
    small = LinesSource(MemoryConnector({"x.txt": b"a\nb"}), LinesArgs(url="memory://", format="text"))
    assert len(pickle.loads(pickle.dumps(small))) == 2
