"""Turns the pixels of Pillow's pictures into RGB or class numbers, of 8 bits or of 16.

Numbers of 16 bits become 8 by v >> 8, whatever the picture, and 8 bits become 16 by v * 257, so that 255 is 65,535. Class
numbers stay as they are stored: Pillow spreads numbers of 2 and 4 bits over 0 to 255, and inverts those of which 0 is white,
which is undone.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import TiffImagePlugin

Depth = Literal[8, 16]

logger = logging.getLogger("loaderkit")
_STORE_AS_NPY = "store it as .npy, which keeps its numbers"
_BITS, _PHOTOMETRIC, _NUM_BANDS, _PLANES, _NUMBER_TYPES = 258, 262, 277, 284, 339  # TIFF's tags
_SIGNED = 2
_CODESTREAM = b"\xff\x4f\xff\x51"  # how that of JPEG 2000 begins
_SPREAD = {"2": 85, "4": 17}  # bits -> by how much Pillow multiplies


class PixelFormat(NamedTuple):
    """How a file stores a picture that Pillow has not loaded yet: Pillow's raw mode ("L;2", "RGB;16B"; "" if it was
    made in memory), the largest level that a PPM names, else 0, whether 0 is white in a TIFF, and the bits of a number of JPEG
    2000, else 0."""

    raw: str = ""
    most: int = 0
    zero_is_white: bool = False
    num_bits: int = 0

    @classmethod
    def of(cls, image: Pillow.Image) -> PixelFormat:
        """The format of a picture that is opened. Raises ValueError for signed numbers, and for pictures that Pillow
        would read wrongly."""
        zero_is_white = False
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _check_tiff(image)
            zero_is_white = image.tag_v2.get(_PHOTOMETRIC) == 0
        tiles: Any = getattr(image, "tile", None)
        if not tiles:
            return cls(zero_is_white=zero_is_white)
        codec, arguments = tiles[0][0], tiles[0][3]
        if codec == "jpeg2k":
            return cls(num_bits=_bits_of_jpeg2000(image))
        if isinstance(arguments, tuple):
            most = arguments[1] if codec.startswith("ppm") and len(arguments) > 1 else 0
            return cls(arguments[0] if arguments and isinstance(arguments[0], str) else "", most, zero_is_white)
        return cls(arguments or "", 0, zero_is_white)

    @property
    def is_inverted(self) -> bool:
        """True if Pillow inverts it, a TIFF or a PBM of which 0 is white."""
        return "I" in self.raw.partition(";")[2]

    @property
    def is_deep(self) -> bool:
        """True for more than 8 bits a number."""
        return ";16" in self.raw or ";12" in self.raw or self.most > 255 or self.num_bits > 8


def _bits_of_jpeg2000(image: Any) -> int:
    """The bits of a number, by the first component in the header of the codestream (ISO/IEC 15444-1, A.5.1); 0 if it is not
    there. Raises ValueError for signed numbers."""
    file = image.fp
    place = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(place)
    begin = data.find(_CODESTREAM)
    found = data[begin + 42 : begin + 43] if begin >= 0 else b""
    if not found:
        return 0
    num_bits = (found[0] & 0x7F) + 1
    if found[0] & 0x80:
        raise ValueError(f"its numbers are signed (of {num_bits} bits), so they are no levels: {_STORE_AS_NPY}")
    return int(num_bits)


def _check_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    tags: Any = image.tag_v2
    bits = tags.get(_BITS, (1,))
    if _SIGNED in tags.get(_NUMBER_TYPES, ()):
        raise ValueError(f"its numbers are signed (of {bits[0]} bits), so they are no levels: {_STORE_AS_NPY}")
    if tags.get(_PLANES, 1) == 2 and len(bits) > 1 and max(bits) > 8:
        raise ValueError(f"its colours of {max(bits)} bits are planes, which Pillow reads wrongly: {_STORE_AS_NPY}")


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def levels_of(image: Pillow.Image, kind: str, stored: PixelFormat, depth: Depth, num_channels: int = 3) -> NDArray[Any]:
    """[H, W, C], uint8 or uint16: grey, RGB or RGBA, opaque if the picture has no transparency. Raises ValueError for a
    picture without such levels."""
    if num_channels not in _MODES:
        raise ValueError(
            f"a {kind} is decoded to 1, 3 or 4 channels, and `channels` is {num_channels}: store it as .npy"
        )
    if image.mode == "F":
        raise ValueError(f"a picture of floating-point numbers has no RGB: {_STORE_AS_NPY}")
    if image.mode == "I" and image.format != "PPM":  # of a PPM these are 16 bits
        raise ValueError(f"a picture of 32-bit integers has no levels that could be kept: {_STORE_AS_NPY}")
    if image.mode.startswith("I"):
        return _of_grey16(image, stored, depth, num_channels)
    if stored.is_deep and depth == 16:
        raise ValueError(f"Pillow reads colours of 16 bits as 8: {_STORE_AS_NPY}, or leave `depth` at 8")
    if stored.is_deep:
        _say_scale()
    mode = _MODES[num_channels]
    if num_channels == 4 and "transparency" in image.info:
        image = _with_key(image, stored)
    try:
        if image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("RGB")
        pixels = np.array(image if image.mode == mode else image.convert(mode))
    except Exception as error:
        raise ValueError(f"a {kind} of mode {image.mode} cannot be made {mode}: {error}") from error
    pixels = pixels.reshape(*pixels.shape[:2], num_channels)
    return pixels if depth == 8 else deepened(pixels)


def _of_grey16(image: Pillow.Image, stored: PixelFormat, depth: Depth, num_channels: int) -> NDArray[Any]:
    values = np.asarray(image).astype(np.uint16) << (4 if stored.raw == "I;12" else 0)
    if stored.zero_is_white:  # at 16 bits Pillow leaves it so
        values = np.uint16(65520 if stored.raw == "I;12" else 65535) - values
    if depth == 8:
        _say_scale()
    levels = values if depth == 16 else (values >> 8).astype(np.uint8)
    repeated = np.repeat(levels[:, :, None], num_channels, axis=2)
    repeated[:, :, 3:] = 65535 if depth == 16 else 255
    if num_channels == 4 and type(key := image.info.get("transparency")) is int:  # of a PNG
        repeated[:, :, 3][np.asarray(image) == key] = 0
    return repeated


def _with_key(image: Pillow.Image, stored: PixelFormat) -> Pillow.Image:
    """A picture with a transparent level, which Pillow does not spread as it does the others. Raises ValueError."""
    if stored.is_deep:
        raise ValueError(f"its transparent colour is of 16 bits, which Pillow compares with 8: {_STORE_AS_NPY}")
    spread = _SPREAD.get(stored.raw.removeprefix("L;")[:1]) if image.mode == "L" else None
    key = image.info["transparency"]
    if spread is not None and type(key) is int:
        image = image.copy()
        image.info["transparency"] = key * spread
    return image


def check_bands(image: Pillow.Image) -> None:
    """Raise ValueError for a TIFF of which Pillow leaves bands out."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return
    tags: Any = image.tag_v2
    num_bands = tags.get(_NUM_BANDS, 1)
    if num_bands > len(image.getbands()):
        raise ValueError(
            f"the TIFF has {num_bands} bands, of which Pillow reads {len(image.getbands())}: {_STORE_AS_NPY}"
        )


def deepened(pixels: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Levels of 8 bits as 16."""
    return pixels.astype(np.uint16) * np.uint16(257)


@cache
def _say_scale() -> None:
    logger.warning(
        "pictures of 16 bits are read as 8 (v >> 8, whatever the picture): `decode: {depth: 16}` keeps them (said once)"
    )


def labels(image: Pillow.Image, stored: PixelFormat, depth: Depth) -> NDArray[Any]:
    """[H, W, 1], uint8 or uint16: palette indices and grey values as they are stored. Raises ValueError."""
    is_deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    if image.mode not in ("P", "L", "1") and not (is_deep and depth == 16):
        remedy = ": `decode: {depth: 16}` keeps its numbers" if is_deep else ""
        raise ValueError(f"a mask has one channel of class numbers up to 255, this one is {image.mode}{remedy}")
    if stored.num_bits not in (0, 8, 16):
        raise ValueError(f"its numbers have {stored.num_bits} bits, which Pillow spreads over 8 or 16: {_STORE_AS_NPY}")
    spread = _SPREAD.get(stored.raw.removeprefix("L;")[:1] if image.mode == "L" else "", 1)
    values: NDArray[Any] = np.array(image).astype(np.uint16 if depth == 16 else np.uint8)
    if stored.is_inverted and image.mode in ("1", "L"):
        values = values.dtype.type(1 if image.mode == "1" else 255) - values
    values //= values.dtype.type(spread)
    if stored.most and image.mode != "1":  # Pillow spreads a PPM's levels over all
        values = np.rint(values * (stored.most / (65535 if is_deep else 255))).astype(values.dtype)
    return values[:, :, None]
