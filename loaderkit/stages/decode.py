"""`decode`: turn encoded bytes into images, numbers, text and arrays, by extension.

JPEG goes through libjpeg-turbo, with the same DCT and upsampling as Pillow's: where a crop comes next, only its pixels are
made (`loaderkit._jpeg`, if that was built), else all of them (simplejpeg). Everything that these refuse (CMYK, odd markers),
and every other image format, goes through Pillow. What Pillow calls truncated is an error on every way, wherever the crop
lies; warnings that leave the picture whole are not.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError
from pydantic import Field

from loaderkit.catalog import IMAGE_EXTENSIONS
from loaderkit.errors import FormatError
from loaderkit.formats.npy import view_npy, view_npz
from loaderkit.images import as_image, describe, jpeg_size
from loaderkit.native import jpeg
from loaderkit.resizing import reduced_box
from loaderkit.schema import FieldNames, StageArgs
from loaderkit.steps import Crop, Need, Needs
from loaderkit.types import Bundle, Encoded, Image, Landed, Rendered, Sample

_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jfif"})
_EXIF_ORIENTATION = 0x0112
_MOST_PIXELS = 178_956_970


class DecodeArgs(StageArgs):
    """Decode images to RGB, `cls` to int, `txt` to text, `json` and `npy` to what they hold; the rest stays bytes.

    An `npz` becomes one field for every array in it, named as in the archive. If a `random_resized_crop`, or a `random_crop`
    without padding, comes next, no more of a JPEG is made into pixels than it will show.
    """

    device: Literal["cpu", "gpu", "dali-cpu"] = Field(
        "cpu",
        description="where images are decoded, and all that follows up to `normalize` is done: gpu and dali-cpu by NVIDIA DALI",
    )
    fields: FieldNames = Field(None, description="decode only these; default: all")
    masks: FieldNames = Field(None, description="images of labels: kept as one channel of class numbers")
    scaled: bool = Field(
        False,
        description="decode JPEGs at 1/2, 1/4 or 1/8 where the `resize` or `random_resized_crop` that follows shrinks them "
        "further: faster, and pixels differ by a few levels",
    )
    exif_orientation: bool = Field(False, description="turn images upright as their EXIF tag says")
    max_pixels: int = Field(
        _MOST_PIXELS,
        ge=1,
        le=_MOST_PIXELS,
        description="refuse larger images (decompression bombs); Pillow allows no more",
    )


def decode(args: DecodeArgs, needs: Needs | None = None, needed: tuple[str, ...] | None = None) -> Callable[..., None]:
    """A function `(sample, draws, scratch) -> None`. JPEGs are decoded into `scratch`'s memory, which the next sample
    with that scratch overwrites, and arrays are views of the bytes they were read as; with None, all own their memory.

    `needs(height, width, draws)` says what the next stage will look at, from the draws of that stage, of the fields `needed`;
    of all of them if that is None.
    """
    decoder = _Decoder(args, needs, None if needed is None else frozenset(needed))

    def run(sample: Sample, draws: Any = None, scratch: dict[str, Any] | None = None) -> None:
        for field in args.fields or tuple(sample):
            value = sample.get(field)
            try:
                if type(value) is Encoded:
                    value = decoder.encoded(value, field, draws, scratch)
                    sample[field] = value
                elif args.fields is not None and type(value) not in (Bundle, Landed, Rendered):
                    sample[field] = decoder.value(value, field, draws, scratch)
                if type(value) is Bundle:
                    _open_bundle(sample, field, value, scratch)
            except _UNREADABLE as error:
                raise ValueError(f"field {field!r}: {error}" if len(sample) > 1 else str(error)) from error

    return run


class _Decoder:
    """Decodes one field, as the arguments say."""

    def __init__(self, args: DecodeArgs, needs: Needs | None, needed: frozenset[str] | None) -> None:
        self._args = args
        self._needs = needs
        self._needed = needed
        self._masks = frozenset(args.masks or ())

    def encoded(self, value: Encoded, field: str, draws: Any, scratch: dict[str, Any] | None) -> Any:
        extension = value.extension.rpartition(".")[2]
        if extension in IMAGE_EXTENSIONS:
            return self._image(value.data, field, draws, scratch, is_jpeg=extension in _JPEG_EXTENSIONS)
        if extension == "npy":
            return _read_npy(value.data, scratch)
        if extension == "npz":
            return Bundle({name: _owned(array, scratch) for name, array in view_npz(value.data).items()})
        reader = _READERS.get(extension)
        return bytes(value.data) if reader is None else reader(value.data)

    def value(self, value: Any, field: str, draws: Any, scratch: dict[str, Any] | None) -> Any:
        """A field that was named, of a source that gives objects: encoded bytes, or an image already."""
        if value is None:
            raise ValueError("the sample has no such field")
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = memoryview(value)
            return self._image(data, field, draws, scratch, is_jpeg=bytes(data[:2]) == b"\xff\xd8")
        image = as_image(value)
        if image is None:
            raise ValueError(f"cannot decode {describe(value)}")
        return image

    def _image(
        self, data: memoryview, field: str, draws: Any, scratch: dict[str, Any] | None, *, is_jpeg: bool
    ) -> Image:
        if not len(data):
            raise ValueError("the file is empty (0 bytes)")
        args = self._args
        if is_jpeg and field not in self._masks and not args.exif_orientation:
            image = self._jpeg(data, field, draws, None if scratch is None else scratch.setdefault(field, {}))
            if image is not None:
                return image
        is_mask = field in self._masks
        return _decode_with_pillow(data, is_mask=is_mask, upright=args.exif_orientation, max_pixels=args.max_pixels)

    def _jpeg(self, data: memoryview, field: str, draws: Any, scratch: dict[str, Any] | None) -> Image | None:
        """RGB, or None where Pillow has to decide."""
        size = jpeg_size(data)
        if size is None:
            return None
        _check_size(*size, self._args.max_pixels)
        is_needed = self._needs is not None and (self._needed is None or field in self._needed)
        need = self._needs(*size, draws) if self._needs is not None and is_needed else Need()
        if need.box is not None and jpeg is not None:
            piece = _piece(data, size, need.box, need.step, scratch)
            if piece is not None:
                return piece
        return _whole(data, size, need.step, scratch)


def _piece(
    data: memoryview, size: tuple[int, int], box: Crop, step: int, scratch: dict[str, Any] | None
) -> Image | None:
    """What a crop shows of a JPEG; None where the whole of it has to be looked at."""
    box_there = reduced_box(box, step)
    row, _, num_rows, num_columns = box_there
    buffer = _memory(num_rows * (num_columns + jpeg.BESIDE) * 3, scratch)
    found = jpeg.decode(data, step, box_there, buffer)
    if found is None:
        return None
    first, num_columns = found
    pixels = buffer[: num_rows * num_columns * 3].reshape(num_rows, num_columns, 3)
    return Image(pixels, False, step, size, (row, first), box)


def _whole(data: memoryview, size: tuple[int, int], step: int, scratch: dict[str, Any] | None) -> Image | None:
    """All of a JPEG, at 1/step; None where Pillow has to decide."""
    height, width = (-(-length // step) for length in size)
    buffer = None if scratch is None else _memory(height * width * 3, scratch).reshape(height, width, 3)
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", min_height=height, min_width=width, min_factor=step, buffer=buffer
        )
    except ValueError as error:
        if "premature end" in str(error).lower():
            raise ValueError(f"truncated JPEG ({len(data)} bytes, {size[1]} x {size[0]}: {error})") from None
        return None
    if step == 1:
        return Image(pixels)
    return Image(pixels, False, step, size) if pixels.shape[:2] == (height, width) else None


def _memory(num_bytes: int, scratch: dict[str, Any] | None) -> NDArray[np.uint8]:
    if scratch is None:
        return np.empty(num_bytes, np.uint8)
    kept: NDArray[np.uint8] | None = scratch.get("pixels")
    if kept is None or kept.size < num_bytes:
        kept = scratch["pixels"] = np.empty(num_bytes + num_bytes // 4, np.uint8)
    return kept[:num_bytes]


_UNREADABLE = (ValueError, OSError, SyntaxError, Pillow.DecompressionBombError)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(
            f"the image is {width} x {height}, more than max_pixels = {max_pixels}: a decompression bomb, or raise the bound"
        )


def _decode_with_pillow(data: memoryview, *, is_mask: bool, upright: bool, max_pixels: int) -> Image:
    try:
        image: Pillow.Image = Pillow.open(io.BytesIO(data))
    except UnidentifiedImageError:
        head = bytes(data[:8])
        raise ValueError(f"not an image Pillow knows ({len(data)} bytes, beginning {head!r})") from None
    with image:
        _check_size(image.height, image.width, max_pixels)
        kind = image.format
        try:
            image.load()
            if kind == "JPEG":
                _check_whole(data)
            if upright and image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
                image = ImageOps.exif_transpose(image)
            pixels = _labels(image) if is_mask else _rgb(image)
        except (OSError, SyntaxError) as error:
            what = "truncated" if "truncated" in str(error) or "premature" in str(error).lower() else "damaged"
            raise ValueError(f"{what} {kind} ({len(data)} bytes, {image.width} x {image.height}: {error})") from None
    return Image(pixels, is_mask)


def _check_whole(data: memoryview) -> None:
    """Raise OSError for a JPEG that was cut and closed again: Pillow fills what is missing with grey and says nothing."""
    try:
        colorspace = simplejpeg.decode_jpeg_header(data)[2]
        simplejpeg.decode_jpeg(data, {"YCbCr": "RGB", "Gray": "GRAY", "YCCK": "CMYK"}.get(colorspace, colorspace))
    except ValueError as error:
        if "premature end" in str(error).lower():
            raise OSError(f"truncated: {error}") from None


def _rgb(image: Pillow.Image) -> NDArray[np.uint8]:
    """[H, W, 3]. Of 16 bits the upper 8 count, for grey as Pillow does for colour; its own conversion of 16-bit grey
    clips at 255 and so turns most of a picture white."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        upper = (values >> 8 if values.dtype.itemsize == 2 or values.max(initial=0) > 255 else values).astype(np.uint8)
        return np.repeat(upper[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("a picture of floating-point numbers has no RGB: store it as .npy")
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _labels(image: Pillow.Image) -> NDArray[np.uint8]:
    """[H, W, 1]: palette indices and grey values as they are."""
    if image.mode not in ("P", "L", "1"):
        raise ValueError(f"a mask has one channel of class numbers up to 255, this one is {image.mode}")
    return np.array(image).astype(np.uint8)[:, :, None]


def _read_npy(data: memoryview, scratch: dict[str, Any] | None) -> NDArray[Any]:
    return _owned(view_npy(data), scratch)


def _owned(array: NDArray[Any], scratch: dict[str, Any] | None) -> NDArray[Any]:
    """The array itself where the memory it was read into is reused, and so nobody keeps it; else a copy."""
    return array if scratch is not None else array.copy(order="K")


def _open_bundle(sample: Sample, field: str, bundle: Bundle, scratch: dict[str, Any] | None) -> None:
    """Put the fields of a bundle in the place of the one that held it."""
    del sample[field]
    for name, value in bundle.fields.items():
        if name in sample:
            raise ValueError(
                f"the archive holds an array called {name!r}, and so is another field of the sample: rename one of them"
            )
        try:
            sample[name] = _read_npy(value.data, scratch) if type(value) is Encoded else value
        except FormatError as error:
            raise FormatError(f"array {name!r}: {error}") from None


def _read_class(data: memoryview) -> int:
    text = bytes(data[:64])
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a class is a whole number, not {text!r}") from None


_READERS: dict[str, Callable[[memoryview], Any]] = {
    "cls": _read_class,
    "txt": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "json": lambda data: json.loads(bytes(data)),
}
