"""`decode` of fields that are no pictures: text, numbers, JSON, .npy and .npz; which fields it takes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import NO_DRAWS, decode_field, encoded, picture
from numpy.typing import NDArray

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, FieldGroup, Image, InPlace
from loaderkit.stages.image.decode import DecodeArgs, decode

# -------------------------------------------------------------------------------------------------------- not images


def npy(array: NDArray[Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("extension", "data", "value"),
    [
        ("cls", b"7", 7),
        ("cls", b" 12\n", 12),
        ("cls", b"-1", -1),
        ("txt", "grüße\n".encode(), "grüße\n"),
        ("text", b"", ""),
        ("caption.txt", b"a cat", "a cat"),
        ("json", b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("bin", b"\0\1\2", b"\0\1\2"),
        ("mp4", b"", b""),
    ],
)
def test_other_fields(extension: str, data: bytes, value: object) -> None:
    found = decode_field(data, extension)
    assert found == value
    assert type(found) is type(value)


def test_json_that_is_large() -> None:
    value = {"boxes": [[i, i + 1] for i in range(1000)], "text": "ü\n\0"}
    assert decode_field(json.dumps(value).encode(), "json") == value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(3, dtype=np.int16),
        np.empty((0, 4), np.uint8),
        np.arange(4, dtype=">i4"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]),
    ],
)
def test_npy(array: NDArray[Any]) -> None:
    found = decode_field(npy(array), "npy")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def npz(**members: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **members)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_arrays_are_views_only_of_memory_that_is_reused() -> None:
    for extension, data, field in (("npy", npy(np.arange(6)), "x"), ("npz", npz(y=np.arange(6)), "y")):
        scratch: dict[str, Any] | None
        for scratch in (None, {}):
            memory = bytearray(data)
            sample: Sample = {"x": Encoded(memoryview(memory), extension)}
            decode(DecodeArgs())(sample, NO_DRAWS, scratch)
            assert sample.keys() == {field}
            assert np.array_equal(sample[field], np.arange(6))
            assert np.shares_memory(sample[field], np.frombuffer(memory, np.uint8)) == (scratch is not None)
            assert sample[field].flags.writeable


def test_an_archive_is_as_many_fields() -> None:
    archive = npz(a=np.arange(3), b=np.zeros((2, 2)))
    sample: Sample = {"z": Encoded(memoryview(archive), "npz"), "other": 1}
    decode(DecodeArgs(fields=("z",)))(sample, NO_DRAWS, None)
    assert sample.keys() == {"a", "b", "other"}
    # What `read` found in it goes the same way: bytes of single members, and what has landed.
    parts = {"a": Encoded(memoryview(npy(np.arange(3))), "npy"), "b": InPlace(32)}
    for args in (DecodeArgs(), DecodeArgs(fields=("z",))):
        sample = {"z": FieldGroup(dict(parts)), "other": 1}
        decode(args)(sample, NO_DRAWS, None)
        assert sample["a"].tolist() == [0, 1, 2]
        assert sample["b"] == InPlace(32)
    for taken in (Encoded(memoryview(archive), "npz"), FieldGroup(dict(parts))):
        sample = {"z": taken, "a": 1}
        with pytest.raises(ValueError, match=r"array called 'a', and so is another field"):
            decode(DecodeArgs())(sample, NO_DRAWS, None)


def test_what_has_landed_is_left_alone() -> None:
    sample: Sample = {"x": InPlace(8)}
    decode(DecodeArgs(fields=("x",)))(sample, NO_DRAWS, None)
    assert sample == {"x": InPlace(8)}


class Trap:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/loaderkit-trap-was-sprung"),))


def test_npy_with_objects_runs_no_code() -> None:
    trap = Path("/tmp/loaderkit-trap-was-sprung")
    trap.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="pickle"):
        decode_field(npy(np.array([Trap()], object), allow_pickle=True), "npy")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("extension", "data"),
    [
        ("cls", b""),
        ("cls", b"cat"),
        ("cls", b"3.5"),
        ("txt", b"\xff\xfe\xfd"),
        ("json", b"{"),
        ("json", b""),
        ("npy", b""),
        ("npy", b"not an array"),
        ("npy", npy(np.arange(100))[:-1]),
        ("npy", npy(np.arange(100))[:40]),
        ("npz", b""),
        ("npz", npy(np.arange(100))),
    ],
)
def test_broken_fields_are_errors(extension: str, data: bytes) -> None:
    with pytest.raises((ValueError, EOFError)) as caught:
        decode_field(data, extension)
    assert str(caught.value)


def test_fields_chooses() -> None:
    sample: Sample = {
        "image": Encoded(memoryview(encoded(picture())), "jpg"),
        "raw": Encoded(memoryview(b"12"), "cls"),
        "label": 3,
    }
    decode(DecodeArgs(fields=("image",)))(sample, NO_DRAWS, None)
    assert type(sample["image"]) is Image
    assert type(sample["raw"]) is Encoded
    assert sample["label"] == 3
    with pytest.raises(ValueError, match="'depth'"):
        decode(DecodeArgs(fields=("depth",)))(sample, NO_DRAWS, None)
