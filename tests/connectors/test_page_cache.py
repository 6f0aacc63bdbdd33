"""What of files lies in the page cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from file_systems import can_be_read_around

from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.page_cache import cached_share, evict, parts_of
from loaderkit.connectors.retries import RetryPolicy


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


class TestAround:
    """Reading past the page cache."""

    def test_nothing_is_left_there(self, files: dict[str, int]) -> None:
        path = list(files)[2]
        if not can_be_read_around(path):
            pytest.skip("this filesystem knows no other way")
        connector, size = FileConnector(Path(path).parent), files[path]
        around, through = bytearray(size - 5), bytearray(size - 5)
        connector.read_direct("c", 5, memoryview(around))
        assert share({path: size}) == 0
        connector.read_into("c", 5, memoryview(through))
        assert around == through
        assert share({path: size}) == 1

    def test_what_was_just_written_is_there(self, tmp_path: Path) -> None:
        content = os.urandom(5_000_000)
        (tmp_path / "x").write_bytes(content)  # and it need not be on the disk yet
        found = bytearray(len(content))
        FileConnector(tmp_path).read_direct("x", 0, memoryview(found))
        assert found == content

    def test_a_filesystem_that_knows_no_other_way(self) -> None:
        folder = Path("/proc")
        try:
            os.close(os.open(folder / "version", os.O_RDONLY | os.O_DIRECT))
            pytest.skip("this one can")
        except OSError:
            pass
        expected = (folder / "version").read_bytes()
        found = bytearray(len(expected))
        FileConnector(folder).read_direct("version", 0, memoryview(found))
        assert found == expected

    def test_several_threads_have_memory_of_their_own(self, tmp_path: Path) -> None:
        content = os.urandom(30_000_000)
        (tmp_path / "x").write_bytes(content)
        connector = RetryConnector(FileConnector(tmp_path), RetryPolicy())
        found = bytearray(len(content))
        read_direct = connector.bulk().read_direct
        assert read_direct is not None

        def read(start: int) -> None:
            part = memoryview(found)[start : start + 999_999]
            read_direct("x", start, part)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(0, len(content), 999_999)))
        assert found == content
        connector.close()
