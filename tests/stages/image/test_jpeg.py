from __future__ import annotations

import pytest
from conftest import make_photo

from loaderkit.stages.image.jpeg import is_well_formed

WHOLE = make_photo(1)


def test_a_photo_is() -> None:
    assert is_well_formed(memoryview(WHOLE))


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
    assert not is_well_formed(memoryview(data))


def test_every_prefix_is_looked_at_without_an_error() -> None:
    assert not any(is_well_formed(memoryview(WHOLE[:length])) for length in range(len(WHOLE) - 1))
