"""What of a file lies in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loaderkit.profile.cold import cached_share, evict


def test_how_much_is_cached(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    for path, size in zip(paths, (4_000_000, 0, 12_000_001), strict=True):
        Path(path).write_bytes(os.urandom(size))
    assert cached_share(paths) == 1
    evict(paths)
    if cached_share(paths) == 1:
        pytest.skip("the files of this filesystem are nowhere but in memory")
    assert cached_share(paths) == 0
    Path(paths[0]).read_bytes()
    assert cached_share(paths) == pytest.approx(0.25, abs=0.02)
    assert cached_share(paths[:2]) == 1
    assert cached_share(paths[1:2]) == 0
    with pytest.raises(FileNotFoundError):
        cached_share([str(tmp_path / "d")])
