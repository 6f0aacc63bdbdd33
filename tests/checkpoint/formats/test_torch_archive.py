"""The archive of one tensor, made without the tensor: torch.save is the oracle, to the byte; torch.load and zipfile read it."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import DTYPES, SHAPES, bytes_in, random_tensor, same, saved
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint.formats.torch_archive import TensorArchive, archive_of
from loaderkit.checkpoint.formats.torch_zip import read_archive

OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.float8_e5m2fnuz)


def written(archive: TensorArchive, data: bytes) -> bytes:
    return archive.head + data + archive.tail(zlib.crc32(data))


@given(st.sampled_from(DTYPES + OTHERS), SHAPES, st.integers(0, 99))
def test_equals_torch_save_to_the_byte(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    tensor = random_tensor(dtype, shape, seed)
    archive = archive_of(dtype, shape)
    made = written(archive, bytes_in(tensor))
    assert made == saved(tensor)
    assert archive.size == len(made)
    assert len(archive.head) % 64 == 0
    assert same(torch.load(io.BytesIO(made), weights_only=True), tensor)


@pytest.mark.parametrize("size", [0x08074B50, 0x04034B50, 2**31, 2**40])
def test_sizes_that_look_like_parts_of_a_zip(size: int) -> None:
    tensor = torch.empty(size, 0, dtype=torch.int8)
    assert written(archive_of(torch.int8, (size, 0)), b"") == saved(tensor)


class Sparse(io.RawIOBase):
    """An archive whose tensor is zeros, which are nowhere."""

    def __init__(self, archive: TensorArchive, tail: bytes) -> None:
        super().__init__()
        self.archive, self.tail, self.at = archive, tail, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.archive.size)[whence]
        return self.at

    def fill(self, start: int, buffer: memoryview) -> None:
        """As a connector reads."""
        self.at = start
        assert self.readinto(buffer) == len(buffer)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.archive.size - self.at))
        buffer[:count] = bytes(count)
        for begin, part in ((0, self.archive.head), (self.archive.size - len(self.tail), self.tail)):
            lo, hi = max(begin, self.at), min(begin + len(part), self.at + count)
            if lo < hi:
                buffer[lo - self.at : hi - self.at] = part[lo - begin : hi - begin]
        self.at += count
        return count


@pytest.mark.parametrize("num_bytes", [2**32 - 1000, 2**32 - 2, 2**32 - 1, 2**32, 5 * 2**30 + 3])
def test_four_gigabytes_and_more(num_bytes: int, tmp_path: Path) -> None:
    archive = archive_of(torch.uint8, (num_bytes,))
    tail = archive.tail(0x12345678)
    assert len(tail) == archive.tail_bytes
    records = zipfile.ZipFile(Sparse(archive, tail)).infolist()
    assert [(item.filename, item.file_size) for item in records if "data/0" in item.filename] == [
        ("archive/data/0", num_bytes)
    ]
    read = read_archive(Sparse(archive, tail).fill, archive.size)
    assert read.value.shape == (num_bytes,)
    assert read.starts == {"0": len(archive.head)}
    # torch itself, from a file with a hole.
    path = tmp_path / "sparse.pt"
    with open(path, "wb") as file:
        file.write(archive.head)
        file.seek(len(archive.head) + num_bytes)
        file.write(tail)
    with open(path, "r+b") as file:
        file.seek(len(archive.head) + num_bytes - 1)
        file.write(b"\7")
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (num_bytes,)
    assert loaded[-1] == 7


@pytest.mark.prove
@pytest.mark.parametrize("num_bytes", [2**32 - 2**26, 2**32 - 1, 2**32, 2**32 + 2**26])
def test_equals_torch_save_beyond_four_gigabytes(num_bytes: int) -> None:
    class Ends(io.RawIOBase):
        """Keeps what is not zeros of the tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.parts: list[bytes] = []
            self.num_bytes = 0

        def writable(self) -> bool:
            return True

        def write(self, data: memoryview) -> int:  # type: ignore[override]
            if len(data) < 2**16:
                self.parts.append(bytes(data))
            self.num_bytes += len(data)
            return len(data)

    file: Any = Ends()
    torch.save(torch.zeros(num_bytes, dtype=torch.uint8), file)
    archive = archive_of(torch.uint8, (num_bytes,))
    crc, left = 0, num_bytes
    block = bytes(2**24)
    while left:
        crc = zlib.crc32(block[: min(left, len(block))], crc)
        left -= min(left, len(block))
    assert b"".join(file.parts) == archive.head + archive.tail(crc)
    assert file.num_bytes == archive.size


def test_a_checksum_that_is_wrong_would_be_found(rng: random.Random) -> None:
    tensor = torch.tensor([rng.random() for _ in range(100)])
    good = written(archive_of(tensor.dtype, (100,)), bytes_in(tensor))
    assert zipfile.ZipFile(io.BytesIO(good)).testzip() is None
    archive = archive_of(tensor.dtype, (100,))
    bad = archive.head + bytes_in(tensor) + archive.tail(1)
    assert zipfile.ZipFile(io.BytesIO(bad)).testzip() == "archive/data/0"
