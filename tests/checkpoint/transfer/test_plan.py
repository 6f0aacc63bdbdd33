"""How ranges are cut, and by how many threads they are read: as suits the store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_states import pack
from file_systems import can_be_read_around, is_out_of_the_page_cache

import loaderkit
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.checkpoint.discovery.archive import TarConnector
from loaderkit.checkpoint.discovery.locate import locate
from loaderkit.checkpoint.transfer.fetch import num_workers_of, plan_access
from loaderkit.checkpoint.transfer.plan import ReadRequest, chunk_bytes_of, limits_of
from loaderkit.connectors.base import Connector, ConnectorTraits, traits_of
from loaderkit.connectors.config import CacheArgs, S3Args, StoreArgs
from loaderkit.connectors.factory import open_connector
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.cache import CacheConnector
from loaderkit.connectors.layers.read_ahead import ReadAheadConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.page_cache import cached_share
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.matrix(1)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    pack([tmp_path / "x.safetensors"], tmp_path, tmp_path / "x.tar")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("name", ["x.safetensors", "", "x.tar"])
def test_a_file_is_no_slow_store(path: Path, name: str) -> None:
    location = locate(path.parent / name, {})
    assert traits_of(location.connector).coalesce_gap == 64 * 2**10
    assert num_workers_of(location.connector, "auto") == max(2, num_cpus())
    location.close()


@pytest.mark.parametrize(("sizes", "is_small"), [([1000] * 9, True), ([1000] * 9 + [10**7], False), ([2**16], False)])
def test_small_tensors_in_files_are_restored_by_one_thread(path: Path, sizes: list[int], is_small: bool) -> None:
    class Far(FileConnector):
        traits = ConnectorTraits(coalesce_gap=3 * 2**20)

    requests = [ReadRequest("x", ("x", 0), size, 0, lambda _: ([], list)) for size in sizes]
    file = FileConnector(str(path.parent))
    assert num_workers_of(file, "auto", requests) == (1 if is_small else max(2, num_cpus()))
    assert num_workers_of(file, 3, requests) == 3, "as it was asked for"
    assert num_workers_of(Far(str(path.parent)), "auto", requests) == 16, "whose requests take their time"


@pytest.mark.parametrize(
    ("sizes", "num_workers"), [([2**20] * 3, 16), ([2**30, *[1000] * 1000], 16), ([2**30, 2**20], 8), ([8 * 2**20], 8)]
)
def test_fewer_threads_restore_long_tensors_each_in_several_requests(
    path: Path, sizes: list[int], num_workers: int
) -> None:
    class Spreading(FileConnector):
        traits = ConnectorTraits(part_size=32 * 2**20)

    requests = [ReadRequest("x", ("x", 0), size, 0, lambda _: ([], list)) for size in sizes]
    location = Spreading(str(path.parent))
    assert num_workers_of(location, "auto", requests) == num_workers
    assert num_workers_of(location, "auto") == 16, "of what nothing is known"
    assert limits_of(location, 2**31, num_workers, is_checked=False).most_bytes == 32 * 2**20
    assert limits_of(location, 2**28, 16, is_checked=False).most_bytes == 2**23, "as memory allows"
    assert limits_of(FileConnector(str(path.parent)), 2**31, 2, is_checked=False).most_bytes == 2**23
    assert chunk_bytes_of(TarConnector(location, lambda info: [])) == 32 * 2**20
    for part_size, spread in (("auto", 32), ("5MiB", 20), ("10MiB", 30), ("16MiB", 32), ("31MiB", 0), ("64MiB", 0)):
        assert (
            S3Connector("s3://anywhere", S3Args.model_validate({"part_size": part_size})).traits.part_size
            == spread * 2**20
        )
    for inner, spread in ((location, 32 * 2**20), (FileConnector(str(path.parent)), 0)):
        assert traits_of(RetryConnector(inner, RetryPolicy(1.0, 2))).part_size == spread


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


LAUNCHERS = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("name", ["", "x.tar"])
def test_what_is_on_disk_is_read_by_more_threads_and_past_the_page_cache(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaderkit.checkpoint.transfer.fetch.num_cpus", lambda: 2)
    safetensors.torch.save_file({"a": torch.ones(10**6)}, path)
    pack([path], path.parent, path.parent / "x.tar")
    location = locate(path.parent / name, {})
    key = "x.tar/x.safetensors" if name else "x.safetensors"
    requests = [ReadRequest("a", (location.prefix + key, 100), 4 * 10**6, 0, lambda _: ([], list))]
    assert plan_access(location.connector, "auto", requests, 2**31) == (2, False)
    if not all(map(is_out_of_the_page_cache, [str(path), str(path.parent / "x.tar")])):
        pytest.skip("the files of this filesystem are nowhere but in memory")
    assert plan_access(location.connector, "auto", requests, 2**31) == (8, True)
    assert plan_access(location.connector, 3, requests, 2**31) == (3, True), "as it was asked for"
    assert plan_access(location.connector, "auto", requests, 2**26) == (4, True), "too little memory for eight"
    for launcher in LAUNCHERS:
        with monkeypatch.context() as patch:
            patch.setenv(launcher, "1")
            assert plan_access(location.connector, "auto", requests, 2**31) == (8, True)
            patch.setenv(launcher, "2")
            assert plan_access(location.connector, "auto", requests, 2**31) == (8, False), (
                "others find it in the page cache"
            )
    small = [ReadRequest("a", (location.prefix + key, 100), 4000, 0, lambda _: ([], list))]
    assert plan_access(location.connector, "auto", small, 2**31) == (1, False), "the kernel reads ahead of small ones"
    for share, expected in ((0.09, (8, True)), (0.2, (8, False)), (0.95, (2, False)), (None, (8, False))):
        monkeypatch.setattr("loaderkit.checkpoint.transfer.fetch.cached_share", lambda ranges, share=share: share)
        assert plan_access(location.connector, "auto", requests, 2**31) == expected
    monkeypatch.setattr("loaderkit.checkpoint.transfer.fetch.cached_share", lambda ranges: 0.0)
    for size, memory, num_workers in ((2**29, 2**31, 16), (2**32, 2**31, 24), (2**32, 2**28, 16)):
        requests = [ReadRequest("a", (location.prefix + key, 100), size, 0, lambda _: ([], list))]
        assert plan_access(location.connector, "auto", requests, memory) == (num_workers, True), (
            "for each there is enough to do"
        )
    location.close()


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(("name", "is_checked"), [("x.safetensors", False), ("x.safetensors", True), ("x.tar", False)])
def test_a_restore_by_one_process_leaves_the_page_cache_alone(
    tmp_path: Path, name: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.rand(12_000_001), "b": torch.rand(2, 4_000_003).half(), "c": torch.ones(3)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    pack([tmp_path / "x.safetensors"], tmp_path, tmp_path / "x.tar")
    if is_checked:
        loaderkit.checkpoint.write_manifest(tmp_path / name)
    path = str(tmp_path / name)
    files = {path: [(0, 64_000_000)]}
    if not is_out_of_the_page_cache(path):
        pytest.skip("the files of this filesystem are nowhere but in memory")
    for num_processes, is_left in ((1, not can_be_read_around(path)), (2, True)):
        assert is_out_of_the_page_cache(path)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
        restored = loaderkit.restore(tmp_path / name)
        share = cached_share(files)
        assert share is not None
        assert (share > 0.9) if is_left else (share < 0.5), "headers are read through it, with what is read ahead"
        assert restored.keys() == state.keys()
        assert all(torch.equal(restored[key], value) for key, value in state.items())
    if is_checked:
        assert is_out_of_the_page_cache(path)
        with open(path, "r+b") as file:
            file.seek(-1_000_000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        assert is_out_of_the_page_cache(path)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        with pytest.raises(CheckpointError, match=r"'b'|x\.safetensors"):
            loaderkit.restore(tmp_path / name)


_NO_DIRECT_READS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
ssize_t pread64(int fd, void *to, size_t count, off64_t start) {
    static ssize_t (*next)(int, void *, size_t, off64_t);
    static long num_left = -1;
    if (next == NULL) {
        next = (ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
        num_left = atol(getenv("DIRECT_READS"));
    }
    if ((fcntl(fd, F_GETFL) & O_DIRECT) && __sync_fetch_and_sub(&num_left, 1) <= 0) {
        static int is_said;
        is_said = is_said || fputs("refused\\n", stderr) >= 0;
        errno = EINVAL;
        return -1;
    }
    return next(fd, to, count, start);
}
ssize_t pread(int fd, void *to, size_t count, off_t start) { return pread64(fd, to, count, start); }
"""
_RESTORE_COLD = """
import sys, torch, loaderkit, safetensors.torch
from loaderkit.connectors.page_cache import evict
evict([sys.argv[1]])
restored, expected = loaderkit.restore(sys.argv[1]), None
expected = safetensors.torch.load_file(sys.argv[1])
assert restored.keys() == expected.keys() and all(torch.equal(restored[key], value) for key, value in expected.items())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("direct_reads", [0, 3])
@pytest.mark.parametrize("is_checked", [False, True])
def test_a_filesystem_that_refuses_to_read_past_the_page_cache(
    tmp_path: Path, direct_reads: int, is_checked: bool
) -> None:
    """It opens files for that, and refuses the first read, or the fourth: what is left is read in the ordinary way."""
    (tmp_path / "refuse.c").write_text(_NO_DIRECT_READS)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", "refuse.so", "refuse.c", "-ldl"], cwd=tmp_path, check=True)
    safetensors.torch.save_file(
        {"a": torch.rand(12_000_001), "b": torch.rand(5_000_003).half()}, tmp_path / "x.safetensors"
    )
    if is_checked:
        loaderkit.checkpoint.write_manifest(tmp_path / "x.safetensors")
    if not is_out_of_the_page_cache(str(tmp_path / "x.safetensors")) or not can_be_read_around(
        str(tmp_path / "x.safetensors")
    ):
        pytest.skip("the files of this filesystem cannot be read past the page cache")
    told = {"LD_PRELOAD": str(tmp_path / "refuse.so"), "DIRECT_READS": str(direct_reads)}
    done = subprocess.run(
        [sys.executable, "-c", _RESTORE_COLD, str(tmp_path / "x.safetensors")],
        env={**os.environ, **told},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, "refused" in done.stderr) == (0, True), done.stderr


def test_what_stands_before_a_connector_says_what_that_one_does(path: Path) -> None:
    class Far(FileConnector):
        traits = ConnectorTraits(coalesce_gap=3 * 2**20)

    def ahead(inner: Connector) -> Connector:
        return ReadAheadConnector(inner, lambda epoch, position: iter(()), memory_bytes=2**20, num_requests=1)

    folder, cached = str(path.parent), StoreArgs(cache=CacheArgs(dir=str(path.parent / "cache")))
    for inner, gap in ((FileConnector(folder), 64 * 2**10), (Far(folder), 3 * 2**20)):
        for connector in (
            ahead(inner),
            CacheConnector(inner, cached.cache),
            ahead(CacheConnector(inner, cached.cache)),
        ):
            assert traits_of(connector).coalesce_gap == gap
    assert traits_of(open_connector(folder, {}, cached)).coalesce_gap == 64 * 2**10
