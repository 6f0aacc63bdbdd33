from __future__ import annotations

import io

import kernel_twins
import pytest
from conftest import make_photo
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from loaderkit import native
from loaderkit.stages.image.formats import jpeg_size

WHOLE = make_photo(1)


def whole_jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """By the kernel, whose twin has to agree."""
    size = native.whole_jpeg_size(data)
    assert size == kernel_twins.whole_jpeg_size(data)
    return size


@pytest.mark.parametrize("behind", [b"", bytes(4000)])
def test_a_photo_is_whole(behind: bytes) -> None:
    size = jpeg_size(memoryview(WHOLE))
    assert size is not None
    assert whole_jpeg_size(memoryview(WHOLE + behind)) == size


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"no picture",
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:200] + WHOLE[400:],
        WHOLE[:2] + b"\xff\xe1\x00\x01" + WHOLE[2:],
        WHOLE + bytes(5000),
    ],
    ids=[
        "empty",
        "start",
        "start and end",
        "text",
        "cut",
        "without a piece",
        "segment shorter than its length",
        "much behind",
    ],
)
def test_what_decoders_may_stumble_over_is_not(data: bytes) -> None:
    assert whole_jpeg_size(memoryview(data)) is None


def test_every_prefix_is_looked_at_without_an_error() -> None:
    assert not any(whole_jpeg_size(memoryview(WHOLE[:length])) for length in range(len(WHOLE) - 1))


class TestJpegSize:
    @given(
        st.integers(1, 300),
        st.integers(1, 300),
        st.sampled_from(["RGB", "L", "CMYK"]),
        st.booleans(),
        st.binary(max_size=40),
        st.integers(0, 4000),
    )
    def test_is_the_decoders(
        self, height: int, width: int, mode: str, progressive: bool, comment: bytes, cut: int
    ) -> None:
        file = io.BytesIO()
        Image.new(mode, (width, height)).save(file, "JPEG", progressive=progressive, comment=comment)
        data = file.getvalue()
        size = None if mode == "CMYK" else (height, width)
        assert jpeg_size(memoryview(data)) == whole_jpeg_size(memoryview(data)) == size
        assert jpeg_size(memoryview(data)[:cut]) in (size, None)

    @given(st.binary(max_size=300).map(lambda tail: b"\xff\xd8" + tail))
    def test_garbage_is_no_picture_or_one(self, data: bytes) -> None:
        size = jpeg_size(memoryview(data))
        assert size is None or all(number > 0 for number in size)
        assert whole_jpeg_size(memoryview(data)) in (None, size)

    @given(st.integers(2, 700), st.integers(0, 255))
    def test_a_byte_that_is_damaged(self, place: int, byte: int) -> None:
        data = memoryview(WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :])
        assert whole_jpeg_size(data) in (None, jpeg_size(data))
