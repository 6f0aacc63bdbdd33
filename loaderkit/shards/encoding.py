"""Turns the values of a sample into the bytes of its members, or into records of an array."""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
import xxhash
from numpy.typing import NDArray
from PIL import Image as Pillow

from loaderkit.native.pixels import packed
from loaderkit.samples.pictures import picture_extension
from loaderkit.samples.values import Clip, Encoded, Image, Pictures
from loaderkit.stages.values import describe, to_tensor

_PLAIN = (bool, int, float, str, type(None))


class EncodedField(NamedTuple):
    """One field of a sample: the format of its bytes ("jpg", "cls", "npy", ...), and True if the bytes are the source's."""

    content: str
    data: bytes
    is_raw: bool = False


class Original(NamedTuple):
    """The encoded bytes of a picture, and a digest of its pixels."""

    data: memoryview
    extension: str
    digest: tuple[Any, ...]


def original_of(value: Any, image: Image) -> Original | None:
    """The bytes from which a picture was decoded; None if they are no file's, or if it was not decoded in full."""
    if image.whole is not None or image.reduction != 1:
        return None
    if type(value) is Encoded:
        extension = value.extension.rpartition(".")[2]
        return Original(value.data, extension, digest_of(image))
    if isinstance(value, dict):  # as Hugging Face's datasets have images
        value = value.get("bytes")
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return None
    data = memoryview(value)
    found = picture_extension(data)
    return None if found is None else Original(data, found, digest_of(image))


def digest_of(image: Image) -> tuple[Any, ...]:
    """Equal for equal pixels."""
    pixels = np.ascontiguousarray(image.pixels)
    return image.mask, pixels.shape, xxhash.xxh3_128_digest(pixels.data)


def encoded_field(  # noqa: PLR0911 - a kind of value each
    value: Any, original: Original | None, *, quality: int, decodes_later: bool
) -> EncodedField:
    """A value as bytes. `decodes_later`: the stage `decode` is left for training, so pictures among bytes are named as such.
    Raises ValueError for a value that cannot be written."""
    if type(value) is Encoded:
        return EncodedField(value.extension.rpartition(".")[2], bytes(value.data), is_raw=True)
    if type(value) is Image:
        if original is not None and original.digest == digest_of(value):
            return EncodedField(original.extension, bytes(original.data))
        return _picture(value, quality)
    if type(value) is Clip:
        value = to_tensor(value)
    if type(value) is Pictures:
        raise ValueError(f"{describe(value)} cannot be written as one file: give each a field of its own in a `call`")
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        file = io.BytesIO()
        np.save(file, _array(value), allow_pickle=False)
        return EncodedField("npy", file.getvalue())
    if isinstance(value, str):
        try:
            return EncodedField("txt", value.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"a text that is no UTF-8 cannot be written: {error}") from None
    if isinstance(value, (bytes, bytearray, memoryview)):
        found = picture_extension(memoryview(value)) if decodes_later else None
        return EncodedField(found or "bin", bytes(value))
    if type(value) is int:
        return EncodedField("cls", str(value).encode())
    return EncodedField("json", _json(value))


def array_of(value: Any) -> NDArray[Any]:
    """The record of a value: images as uint8 [C, H, W]. Raises ValueError for a value that is no array."""
    if type(value) is Image:
        return np.ascontiguousarray(packed(value.pixels).transpose(2, 0, 1))
    if type(value) is Clip:
        return to_tensor(value).numpy()
    if type(value) in (bool, int, float):
        return np.asarray(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _array(value)
    kind = "still encoded: `decode` makes an array of it" if type(value) is Encoded else describe(value)
    raise ValueError(f"an array holds numbers of one shape, and this is {kind}")


def _array(value: Any) -> NDArray[Any]:
    """C order, little-endian, of a type that torch has."""
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except TypeError as error:
        raise ValueError(f"{describe(value)} has no type of NumPy's: {error}") from None
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise ValueError(f"an array of {array.dtype} cannot be written: it holds no numbers")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _picture(image: Image, quality: int) -> EncodedField:
    if image.mask:
        file = io.BytesIO()
        Pillow.fromarray(np.ascontiguousarray(image.pixels[:, :, 0])).save(file, "PNG")
        return EncodedField("png", file.getvalue())
    if image.pixels.shape[2] != 3:
        raise ValueError(
            f"{describe(image)} would come back with three channels: make it three (in `call`), or name it in `masks` of "
            "`decode` if its values are labels"
        )
    pixels = np.ascontiguousarray(packed(image.pixels))
    return EncodedField("jpg", simplejpeg.encode_jpeg(pixels, quality, "RGB", "420", fastdct=False))


def _json(value: Any) -> bytes:
    try:
        text = json.dumps(value)
        same = _is_same(json.loads(text), value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{describe(value)} cannot be written: {error}") from None
    if not same:
        raise ValueError(f"{describe(value)} would not come back as it is from JSON")
    return text.encode()


def _is_same(one: Any, other: Any) -> bool:
    """Equal in type and value, nan included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in _PLAIN and (one == other or repr(one) == repr(other))
