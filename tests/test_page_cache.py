"""What of files lies in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loaderkit.connectors.file import FileConnector
from loaderkit.page_cache import cached_share, evict, parts_of


@pytest.fixture
def files(tmp_path: Path) -> dict[str, int]:
    """Three files and their sizes, none of them in the page cache."""
    sizes = {str(tmp_path / name): size for name, size in (("a", 4_000_000), ("b", 0), ("c", 12_000_001))}
    for path, size in sizes.items():
        Path(path).write_bytes(os.urandom(size))
    assert share(sizes) == 1
    evict(sizes)
    if share(sizes) == 1:
        pytest.skip("the files of this filesystem are nowhere but in memory")
    return sizes


def share(sizes: dict[str, int]) -> float | None:
    return cached_share({path: [(0, size)] for path, size in sizes.items()})


def test_how_much_is_cached(files: dict[str, int]) -> None:
    first, empty, _ = files
    assert share(files) == 0
    Path(first).read_bytes()
    assert share(files) == pytest.approx(0.25, abs=0.02)
    assert share({first: files[first]}) == 1
    assert share({empty: 0}) is None


def test_only_the_parts_count(files: dict[str, int]) -> None:
    path = list(files)[2]
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(descriptor, 3_000_000, 8_000_000)
    os.close(descriptor)
    assert cached_share({path: [(8_000_000, 1_000_000), (9_000_000, 2_000_000)]}) == 1
    assert cached_share({path: [(0, 7_000_000)]}) == 0
    assert cached_share({path: [(8_000_000, 3_000_000), (12_000_001, 50_000_000)]}) == 1, (
        "there is nothing behind its end"
    )
    assert cached_share({path: [(10_000_000, 1_000_000), (0, 1_000_000)]}) == pytest.approx(0.5, abs=0.01)


def test_what_the_kernel_does_not_tell_is_not_known(files: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_share({"/nowhere": [(0, 1)]}) is None
    assert cached_share({"/sys/devices/system/cpu/online": [(0, 1)]}) is None, "it cannot be mapped"
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    monkeypatch.setattr("os.access", lambda *args, **more: False)
    assert share(files) is None, "another user's: Linux says that all of it is there"


def test_members_of_archives_and_odd_names(tmp_path: Path) -> None:
    folder = tmp_path / "run!1"
    folder.mkdir()
    for name in ("a.tar", "b!c", "plain"):
        (folder / name).write_bytes(b"x" * 100)
    (tmp_path / "run").write_bytes(b"another one's")

    class Described(FileConnector):
        def describe(self, key: str) -> str:
            return super().describe(key).replace(".tar/", ".tar!")

    connector = Described(folder)
    assert parts_of(connector, [("a.tar/m", 10, 5), ("a.tar/n", 20, 5)]) == {str(folder / "a.tar"): [(0, 100)]}
    assert parts_of(connector, [("b!c", 1, 2), ("plain", 3, 4), ("b!c", 5, 6)]) == {
        str(folder / "b!c"): [(1, 2), (5, 6)],
        str(folder / "plain"): [(3, 4)],
    }
    assert parts_of(connector, [("gone.tar/m", 0, 1)]) == {}
