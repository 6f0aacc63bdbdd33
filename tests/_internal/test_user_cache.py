"""What is kept in the user's cache directory: whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.errors import UnreachableError


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = path_in_cache(tmp_path, "folder", "s3://bucket/\udce9", ".npz")
    assert path != path_in_cache(tmp_path, "folder", "s3://bucket/e", ".npz")
    assert keep(path, lambda file: file.write(b"one"))

    def fail(error: BaseException, file: IO[bytes]) -> None:
        file.write(b"half")
        raise error

    assert not keep(path, partial(fail, OSError(errno.ENOSPC, "full")))
    for error in (UnreachableError("s3"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            keep(path, partial(fail, error))
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"one"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_killed_processes_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool) -> None:
    """At once where files can be locked, else what has not changed for a day."""
    names = {"killed": 2 * 24 * 3600, "writing": 3600}
    ages_s = {f"{name}.0123456789abcdef.tmp": age_s for name, age_s in names.items()} | {"kept.npz": 2 * 24 * 3600}
    for name, age_s in ages_s.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.close(-1))
    assert keep(tmp_path / "new.npz", lambda file: file.write(b""))
    left = {file.name for file in tmp_path.iterdir()} - {"kept.npz", "new.npz"}
    assert left == (set() if has_locks else {"writing.0123456789abcdef.tmp"})
