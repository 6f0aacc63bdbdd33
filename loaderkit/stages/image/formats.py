"""Reads the formats of pictures: JPEG's header, and pixels by Pillow, whose errors become ValueErrors that name the damage.

Only the formats of a closed list are opened, whatever a file's name: Pillow's PostScript reader starts Ghostscript.
"""

from __future__ import annotations

import io
import math
import re
import struct
from functools import cache
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageFile, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError, features

from loaderkit import native
from loaderkit.samples.pictures import FORMATS, Format, looks_like
from loaderkit.samples.values import Image
from loaderkit.stages.image.levels import Depth, PixelFormat, check_bands, labels, levels_of

MOST_PIXELS = 178_956_970
"""Pillow refuses pictures with more pixels."""

_OPTIONAL = {"webp": "webp", "avif": "avif", "jpeg2000": "jpg_2000"}  # Pillow may be built without these
# Of a JPEG's segments.
_MARKER, _START_OF_IMAGE, _START_OF_SCAN = 0xFF, 0xD8, 0xDA
_WITHOUT_LENGTH = frozenset({0x00, 0x01, _MARKER, *range(0xD0, 0xDA)})
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive
_OTHER_FRAMES = frozenset({0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)})
_ORIENTATION = 0x0112
_TILE_SIZES = (322, 323)
_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """(height, width) from the frame header of a baseline, extended or progressive JPEG of 8 bits with 1 or 3 channels; None
    for all others. It takes 2 us, against 10 by a decoder."""
    if len(data) <= 4 or data[0] != _MARKER or data[1] != _START_OF_IMAGE:
        return None
    offset = 2
    while len(data) - offset > 9 and data[offset] == _MARKER:
        marker = data[offset + 1]
        if marker == _MARKER:  # a fill byte
            offset += 1
            continue
        if marker in _FRAMES and data[offset + 4] == 8:
            height, width = data[offset + 5] << 8 | data[offset + 6], data[offset + 7] << 8 | data[offset + 8]
            return (height, width) if height and width and data[offset + 9] in (1, 3) else None
        if marker == _START_OF_SCAN or marker in _WITHOUT_LENGTH or marker in _FRAMES or marker in _OTHER_FRAMES:
            return None
        offset += 2 + (data[offset + 2] << 8 | data[offset + 3])
    return None


def decode_jpeg(
    data: memoryview, size: tuple[int, int], step: int, buffer: NDArray[np.uint8] | None = None
) -> Image | None:
    """The whole JPEG of `size` at 1/step, by simplejpeg, in `buffer` [H, W, 3] if it is given; None if Pillow must decode it.
    Raises ValueError for one that is truncated."""
    shape = (-(-size[0] // step), -(-size[1] // step))
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", min_height=shape[0], min_width=shape[1], min_factor=step, buffer=buffer
        )
    except Exception as error:  # also KeyError, for chroma subsamplings it does not know
        if "premature end" in str(error).lower():
            raise ValueError(f"truncated JPEG ({len(data)} bytes, {size[1]} x {size[0]}: {error})") from None
        return None
    if step == 1:
        return Image(pixels)
    return Image(pixels, False, step, size) if pixels.shape[:2] == shape else None


def decode_picture(
    data: memoryview,
    *,
    formats: tuple[Format, ...],
    is_mask: bool,
    upright: bool,
    max_pixels: int,
    depth: Depth = 8,
    num_channels: int = 3,
) -> Image:
    """A picture in one of the `formats`, recognized by its bytes. Raises ValueError."""
    try:
        image: Pillow.Image = Pillow.open(io.BytesIO(data), formats=available(formats))
    except UnidentifiedImageError:
        raise ValueError(_refusal(data, formats)) from None
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise ValueError(f"too large an image for Pillow ({len(data)} bytes): {error}") from None
    except Exception as error:
        raise _refused(data, (looks_like(data) or "picture").upper(), "", error) from error
    with image:
        check_size(image.height, image.width, max_pixels)
        kind, size = image.format or "", f", {image.width} x {image.height}"
        stored = PixelFormat.of(image)
        try:
            _check_tiles(data, image)
            image.load()
        except Exception as error:
            raise _refused(data, kind, size, error) from error
        if kind in ("JPEG", "MPO") and native.is_cut(data):
            raise ValueError(f"truncated {kind} ({len(data)} bytes{size}: it ends early, and the rest would be grey)")
        return _converted(image, stored, is_mask=is_mask, upright=upright, depth=depth, num_channels=num_channels)


def converted(
    image: Pillow.Image,
    *,
    is_mask: bool = False,
    upright: bool = False,
    keeps_grey: bool = False,
    depth: Depth = 8,
    num_channels: int = 3,
) -> Image:
    """A picture of any mode that was opened by Pillow, as RGB, grey or RGBA, or as a mask. Raises ValueError."""
    stored = PixelFormat.of(image)
    try:
        image.load()
    except Exception as error:
        raise ValueError(f"Pillow's image cannot be loaded: {error!r:.200}") from error
    if keeps_grey and image.mode == "L":
        return Image(np.array(image)[:, :, None])
    return _converted(image, stored, is_mask=is_mask, upright=upright, depth=depth, num_channels=num_channels)


def _converted(
    image: Pillow.Image, stored: PixelFormat, *, is_mask: bool, upright: bool, depth: Depth, num_channels: int
) -> Image:
    kind = image.format or "picture"  # one made in memory has no format
    if num_channels > 3 and not is_mask:
        check_bands(image)
    if upright:
        image = _upright(image)
    pixels = labels(image, stored, depth) if is_mask else levels_of(image, kind, stored, depth, num_channels)
    return Image(pixels, is_mask)


def seems_a_picture(data: memoryview) -> bool:
    """True for the beginning of a picture, also in a format that is not opened."""
    return looks_like(data) in (*FORMATS, "HEIC", "JPEG XL", "a Photoshop file")


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise ValueError for a picture with more than `max_pixels`."""
    if height * width > max_pixels:
        raise ValueError(
            f"the image is {width} x {height}, more than max_pixels = {max_pixels}: a decompression bomb, or raise the bound"
        )


def _check_tiles(data: memoryview, image: Pillow.Image) -> None:
    """Raise ValueError for tiles that take far more memory than the picture: very many in JPEG 2000, as OpenJPEG allocates
    12 kB for each, even a missing one; very large ones in TIFF."""
    num_pixels = image.height * image.width
    if image.format == "JPEG2000":
        offset = _codestream(data)
        if bytes(data[offset : offset + 4]) != b"\xff\x4f\xff\x51":
            raise ValueError("it has no codestream where its boxes end")
        right, bottom, _, _, width, height, left, top = struct.unpack_from(">8I", data, offset + 8)
        num_tiles = math.ceil((right - left) / width) * math.ceil((bottom - top) / height)
        if num_tiles > 4096 + num_pixels // 1024:
            raise ValueError(f"its header cuts it into {num_tiles} tiles")
    elif isinstance(image, TiffImagePlugin.TiffImageFile):
        sizes = [image.tag_v2.get(tag, 0) for tag in _TILE_SIZES]
        if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > 2**20 + 4 * num_pixels:
            raise ValueError(f"its header gives it tiles of {sizes[0]} x {sizes[1]}")


def _codestream(data: memoryview) -> int:
    """The offset of a JPEG 2000 codestream: in its box, or 0 without boxes."""
    offset = 0
    while bytes(data[offset : offset + 4]) != b"\xff\x4f\xff\x51" and offset + 16 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        head = 8
        if size == 1:  # a 64-bit size follows
            size, head = struct.unpack_from(">Q", data, offset + 8)[0], 16
        if kind == b"jp2c":
            return offset + head
        offset += max(size, head) if size else len(data)
    return offset


@cache
def available(formats: tuple[Format, ...]) -> tuple[Format, ...]:
    """The formats that this Pillow was built with."""
    Pillow.init()
    return tuple(
        name
        for name in formats
        if name.upper() in Pillow.OPEN and (name not in _OPTIONAL or features.check(_OPTIONAL[name]))
    )


def _refusal(data: memoryview, formats: tuple[Format, ...]) -> str:
    """The message for a file in none of the formats."""
    name, allowed = looks_like(data), ", ".join(formats)
    if name is None:
        return (
            f"not an image of a known format ({len(data)} bytes, beginning {bytes(data[:8])!r}): {allowed} are opened"
        )
    seems = f"not an image that may be opened: it seems to be {name} ({len(data)} bytes)"
    if name not in FORMATS:
        return f"{seems}, and only {allowed} are: convert it, or leave it out"
    if name not in formats:
        return f"{seems}, and `formats` allows only {allowed}: add {name} to them, or leave it out"
    if name not in available(formats):
        return f"{seems}, and this Pillow was built without: install one that has it"
    try:
        Pillow.OPEN[name.upper()][0](io.BytesIO(data), "")  # it says why, in other words than `Pillow.open`
    except Exception as error:
        if _NOT_READ.search(str(error)):
            layout = _tiff_layout(data) if name == "tiff" else ""
            return str(_refused(data, name.upper(), layout, error))
    return f"damaged {name.upper()} ({len(data)} bytes: its header cannot be read)"


_NOT_READ = re.compile("unsupported|not supported|unknown|cannot handle|unrecognized|samples per pixel", re.IGNORECASE)
_LIMIT = re.compile("MAX_TEXT_(CHUNK|MEMORY)")


def _refused(data: memoryview, kind: str, size: str, error: Exception) -> ValueError:
    """The error for a picture that Pillow does not read: by its own limits, or not at all, or because it is damaged."""
    reason = str(error) if " " in str(error) else repr(error)
    if limit := _LIMIT.search(reason):
        return ValueError(
            f"the {kind} has more metadata than Pillow allows ({len(data)} bytes{size}: {reason:.200}): raise "
            f"PIL.PngImagePlugin.{limit[0]} where the training begins, which loading processes are told, or leave it out"
        )
    if _NOT_READ.search(reason):
        return ValueError(
            f"Pillow does not read such a {kind} ({len(data)} bytes{size}: {reason:.200}): convert it, store it as .npy, or "
            "leave it out"
        )
    problem = "truncated" if re.search("truncated|premature", reason, re.IGNORECASE) else "damaged"
    return ValueError(f"{problem} {kind} ({len(data)} bytes{size}: {reason:.200})")


def _tiff_layout(data: memoryview) -> str:
    """What a TIFF says of its size and bands, for messages; "" if that cannot be read."""
    file = io.BytesIO(data)
    try:
        head = file.read(8)
        tags: Any = TiffImagePlugin.ImageFileDirectory_v2(head + (file.read(8) if head[2] == 43 else b""))
        file.seek(tags.next)
        tags.load(file)
        bits = tags.get(258, (1,))
        return f", {tags[256]} x {tags[257]}, {tags.get(277, 1)} bands of {bits[0]} bits, which make no RGB"
    except Exception:
        return ""


_LIMITS = {
    Pillow: ("MAX_IMAGE_PIXELS",),
    ImageFile: ("LOAD_TRUNCATED_IMAGES", "MAXBLOCK", "SAFEBLOCK"),
    PngImagePlugin: ("MAX_TEXT_CHUNK", "MAX_TEXT_MEMORY"),
}


def pillow_limits() -> list[Any]:
    """Pillow's limits in this process, for `set_pillow_limits` in another one."""
    return [getattr(module, name) for module, names in _LIMITS.items() for name in names]


def set_pillow_limits(values: list[Any]) -> None:
    """Set Pillow's limits as they are in another process."""
    names = ((module, name) for module, names in _LIMITS.items() for name in names)
    for (module, name), value in zip(names, values, strict=True):
        setattr(module, name, value)


def _upright(image: Pillow.Image) -> Pillow.Image:
    """The picture rotated by its EXIF orientation; unchanged if that cannot be read."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return image
    return image if turn is None else image.transpose(turn)
