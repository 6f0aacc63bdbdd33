from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from decoding import NO_DRAWS, Pixels, decode_field, encoded, picture, pixels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps
from pydantic import ValidationError

from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, Image
from loaderkit.stages.image.decode import DecodeArgs, decode


def by_pillow(data: bytes) -> Pixels:
    with Pillow.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def assert_same(found: Pixels, expected: Pixels, levels: int = 1) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= levels


# -------------------------------------------------------------------------------------------------------------- JPEG

JPEGS: dict[str, dict[str, Any]] = {
    "baseline": {"quality": 90},
    "poor": {"quality": 10},
    "progressive": {"quality": 85, "progressive": True},
    "optimised": {"quality": 85, "optimize": True},
    "4:4:4": {"quality": 92, "subsampling": "4:4:4"},
    "4:2:2": {"quality": 85, "subsampling": "4:2:2"},
    "4:2:0": {"quality": 85, "subsampling": "4:2:0"},
    "progressive 4:2:0": {"quality": 75, "subsampling": "4:2:0", "progressive": True},
    "restart markers": {"quality": 85, "restart_marker_blocks": 3},
    "stored as RGB": {"quality": 90, "keep_rgb": True},
}
ROUTES: list[dict[str, Any]] = [{}, {"exif_orientation": True}]
MODES = {"grayscale": "L", "CMYK": "CMYK", "YCbCr": "YCbCr"}


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("size", [(97, 131), (1, 1), (7, 16), (64, 33)])
def test_jpeg_equals_pillow(options: dict[str, Any], size: tuple[int, int]) -> None:
    data = encoded(picture(*size), **options)
    assert_same(pixels_of(data), by_pillow(data))
    assert_same(pixels_of(data, exif_orientation=True), by_pillow(data))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_of_other_colours(mode: str, progressive: bool) -> None:
    data = encoded(picture().convert(mode), quality=90, progressive=progressive)
    assert_same(pixels_of(data), by_pillow(data))


@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(1, 100), st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.booleans(), st.sampled_from(["RGB", "L", "CMYK"]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=num_examples(60))
def test_any_jpeg_equals_pillow(
    height: int, width: int, quality: int, subsampling: str, progressive: bool, mode: str, seed: int
) -> None:
    image = picture(height, width, seed).convert(mode)
    data = encoded(image, quality=quality, subsampling=subsampling, progressive=progressive)
    assert_same(pixels_of(data), by_pillow(data))


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "jfif", "cam0.jpg"])
def test_extensions_of_jpeg(extension: str) -> None:
    data = encoded(picture())
    assert_same(pixels_of(data, extension), by_pillow(data))


@pytest.mark.parametrize("route", ROUTES, ids=["simplejpeg", "pillow"])
@pytest.mark.parametrize("name", ["baseline", "progressive", "4:4:4", "CMYK", "grayscale"])
def test_a_cut_jpeg_is_an_error_wherever_it_is_cut(name: str, route: dict[str, Any]) -> None:
    data = encoded(picture(48, 40).convert(MODES.get(name, "RGB")), **JPEGS.get(name, {}))
    for end in range(1, len(data)):
        with pytest.raises(ValueError, match=r"(?i)truncated|premature|not an image|damaged"):
            decode_field(data[:end], "jpg", **route)


@pytest.mark.parametrize("route", ROUTES, ids=["simplejpeg", "pillow"])
@pytest.mark.parametrize("name", ["baseline", "progressive", "4:4:4", "grayscale", "CMYK"])
def test_a_cut_jpeg_with_an_end_is_an_error_too(name: str, route: dict[str, Any]) -> None:
    """Programs that mend a cut file put an end marker there: what is missing would be a grey area."""
    data = encoded(picture().convert(MODES.get(name, "RGB")), **JPEGS.get(name, {}))
    for share in (0.5, 0.7, 0.9):
        with pytest.raises(ValueError, match=r"(?i)truncated|premature|damaged|corrupt"):
            decode_field(data[: int(share * len(data))] + b"\xff\xd9", "jpg", **route)


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"garbage" * 30, b"\xff\xd8\xff", b"\r\n"])
def test_garbage_behind_a_jpeg_is_harmless(tail: bytes) -> None:
    data = encoded(picture())
    for route in ROUTES:
        assert_same(pixels_of(data + tail, **route), by_pillow(data))


def test_extraneous_bytes_before_a_marker_are_harmless() -> None:
    data = encoded(picture(), quality=90)
    # Fill bytes (0xFF) before a marker are legal, and plain bytes there a mere warning of libjpeg's.
    for filling in (b"\xff" * 5, b"\x00\x01\x02"):
        place = data.index(b"\xff\xda")
        filled = data[:place] + filling + data[place:]
        assert_same(pixels_of(filled), by_pillow(filled))


# ----------------------------------------------------------------------------------------------------- other formats


def with_palette(transparent: bool) -> tuple[Pillow.Image, dict[str, Any]]:
    image = picture().quantize(64)
    return image, {"transparency": bytes([0, 128, *([255] * 62)])} if transparent else {}


def other_pictures() -> dict[str, tuple[bytes, str]]:
    rgb = picture()
    alpha = rgb.copy()
    alpha.putalpha(Pillow.linear_gradient("L").resize(rgb.size))
    grey_alpha = alpha.convert("LA")
    palette, no_options = with_palette(False)
    _, transparency = with_palette(True)
    return {
        "PNG": (encoded(rgb, "PNG"), "png"),
        "PNG with alpha": (encoded(alpha, "PNG"), "png"),
        "PNG with palette": (encoded(palette, "PNG", **no_options), "png"),
        "PNG with palette, one colour transparent": (encoded(palette, "PNG", transparency=3), "png"),
        "PNG with palette, alphas": (encoded(palette, "PNG", **transparency), "png"),
        "PNG, grey": (encoded(rgb.convert("L"), "PNG"), "png"),
        "PNG, grey with alpha": (encoded(grey_alpha, "PNG"), "png"),
        "PNG, 1 bit": (encoded(rgb.convert("1"), "PNG"), "png"),
        "PNG, interlaced by 2 bits": (encoded(rgb.quantize(4), "PNG", bits=2), "png"),
        "WebP, lossy": (encoded(rgb, "WEBP", quality=80), "webp"),
        "WebP, lossless": (encoded(rgb, "WEBP", lossless=True), "webp"),
        "WebP with alpha": (encoded(alpha, "WEBP", lossless=True), "webp"),
        "BMP": (encoded(rgb, "BMP"), "bmp"),
        "BMP with palette": (encoded(palette, "BMP"), "bmp"),
        "GIF": (encoded(palette, "GIF"), "gif"),
        "GIF, transparent": (encoded(palette, "GIF", transparency=5), "gif"),
        "TIFF": (encoded(rgb, "TIFF"), "tif"),
        "TIFF, deflated": (encoded(rgb, "TIFF", compression="tiff_adobe_deflate"), "tiff"),
        "TIFF, CMYK": (encoded(rgb.convert("CMYK"), "TIFF"), "tiff"),
        "PPM": (encoded(rgb, "PPM"), "ppm"),
    }


OTHERS = other_pictures()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_equal_pillow(name: str) -> None:
    data, extension = OTHERS[name]
    pixels = pixels_of(data, extension)
    assert_same(pixels, by_pillow(data), levels=0)
    assert pixels.shape == (97, 131, 3)


def png_of_16_bits(values: NDArray[np.uint16]) -> bytes:
    """Grey [H, W] or RGB [H, W, 3], written by hand from the PNG specification."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    colour = 0 if values.ndim == 2 else 2

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("top", [65535, 30000, 200])
def test_of_16_bits_the_upper_8_count(top: int) -> None:
    values = np.random.default_rng(0).integers(0, top + 1, (30, 41)).astype(np.uint16)
    expected = np.repeat((values >> 8)[:, :, None], 3, axis=2).astype(np.uint8)
    assert np.array_equal(pixels_of(png_of_16_bits(values), "png"), expected)
    colours = np.random.default_rng(1).integers(0, top + 1, (30, 41, 3)).astype(np.uint16)
    data = png_of_16_bits(colours)
    assert_same(pixels_of(data, "png"), by_pillow(data))
    assert_same(pixels_of(data, "png"), (colours >> 8).astype(np.uint8))
    tiff = encoded(Pillow.fromarray(values), "TIFF")
    assert np.array_equal(pixels_of(tiff, "tif"), expected)


def test_the_content_decides_not_the_name() -> None:
    png = OTHERS["PNG"][0]
    assert np.array_equal(pixels_of(png, "jpg"), by_pillow(png))
    jpeg = encoded(picture())
    assert_same(pixels_of(jpeg, "png"), by_pillow(jpeg))


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
def test_what_is_no_picture(extension: str) -> None:
    with pytest.raises(ValueError, match=r"not an image.*12 bytes.*b'hello wo"):
        decode_field(b"hello world\n", extension)
    with pytest.raises(ValueError, match=r"empty.*0 bytes"):
        decode_field(b"", extension)
    with pytest.raises(ValueError, match="not an image"):
        decode_field(b"<html><body>404</body></html>", extension)
    with pytest.raises(ValueError, match=r"not an image|truncated|damaged"):
        decode_field(b"\xff\xd8", extension)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_cut_short(name: str) -> None:
    """Cut anywhere, a picture is an error unless every pixel was there already."""
    data, extension = OTHERS[name]
    whole = pixels_of(data, extension)
    num_refused = 0
    ends = {*np.linspace(1, len(data) - 1, 60).astype(int).tolist(), *range(len(data) - 20, len(data))}
    for end in sorted(ends):
        try:
            pixels = pixels_of(data[:end], extension)
        except (ValueError, OSError, SyntaxError):
            num_refused += 1
        else:
            assert np.array_equal(pixels, whole), f"{name} cut at {end} of {len(data)} gave a damaged picture"
    assert num_refused >= 55


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_png_says_so(share: float) -> None:
    data = OTHERS["PNG"][0]
    with pytest.raises(ValueError, match=r"truncated PNG .*131 x 97"):
        decode_field(data[: int(share * len(data))], "png")


@given(st.binary(max_size=300), st.sampled_from(["jpg", "png", "webp", "gif", "tif", "bmp", "ppm"]))
def test_any_bytes_are_a_picture_or_an_error(data: bytes, extension: str) -> None:
    try:
        found = decode_field(data, extension)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - most bytes are an error, not all
    else:
        assert type(found) is Image


# -------------------------------------------------------------------------------------------- EXIF, masks, max_pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {"quality": 90}))
    extension = kind.lower()
    assert_same(pixels_of(data, extension), by_pillow(data))
    with Pillow.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    found = pixels_of(data, extension, exif_orientation=True)
    assert_same(found, expected)
    assert found.shape[:2] == ((131, 97) if orientation >= 5 else (97, 131))


@pytest.mark.parametrize("orientation", [0, 9, 200])
def test_an_orientation_that_means_nothing_is_ignored(orientation: int) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), exif=exif)
    assert_same(pixels_of(data, exif_orientation=True), by_pillow(data))


def decode_pair(image: bytes, mask: bytes, **args: Any) -> Sample:
    sample: Sample = {
        "image": Encoded(memoryview(image), "jpg"),
        "mask": Encoded(memoryview(mask), "seg.png"),
    }
    decode(DecodeArgs.model_validate(args))(sample, NO_DRAWS, None)
    return sample


@pytest.mark.parametrize("mode", ["P", "L", "1"])
def test_masks_keep_their_numbers(mode: str) -> None:
    labels = np.random.default_rng(3).integers(0, 2 if mode == "1" else 21, (97, 131)).astype(np.uint8)
    labels[0, 0] = 1 if mode == "1" else 255
    image = Pillow.fromarray(labels * 255 if mode == "1" else labels)
    if mode == "P":
        image = Pillow.fromarray(labels)
        image.putpalette(np.random.default_rng(4).integers(0, 256, 768).astype(np.uint8).tobytes())
    elif mode == "1":
        image = image.convert("1")
    sample = decode_pair(encoded(picture()), encoded(image, "PNG"), masks=["mask"])
    assert sample["mask"].mask
    assert sample["mask"].pixels.shape == (97, 131, 1)
    assert np.array_equal(sample["mask"].pixels[:, :, 0], labels)
    assert not sample["image"].mask
    assert sample["image"].pixels.shape == (97, 131, 3)


def test_masks_turn_with_their_image() -> None:
    labels = np.arange(97 * 131).reshape(97, 131).astype(np.uint8)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    mask = encoded(Pillow.fromarray(labels), "PNG", exif=exif)
    sample = decode_pair(encoded(picture(), exif=exif), mask, masks=["mask"], exif_orientation=True)
    assert np.array_equal(sample["mask"].pixels[:, :, 0], np.rot90(labels, -1))
    assert sample["image"].pixels.shape == (131, 97, 3)


def test_a_mask_of_colours_is_refused() -> None:
    with pytest.raises(ValueError, match="one channel"):
        decode_pair(encoded(picture()), OTHERS["PNG"][0], masks=["mask"])
    with pytest.raises(ValueError, match="one channel"):
        decode_pair(encoded(picture()), png_of_16_bits(np.zeros((4, 4), np.uint16)), masks=["mask"])


@pytest.mark.parametrize(("kind", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_large_pictures_are_refused_before_they_are_decoded(kind: str, extension: str) -> None:
    data = encoded(picture(), kind)
    assert pixels_of(data, extension, max_pixels=97 * 131).shape == (97, 131, 3)
    for route in ROUTES:
        with pytest.raises(ValueError, match="131 x 97, more than max_pixels = 12706"):
            decode_field(data, extension, max_pixels=97 * 131 - 1, **route)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    """The header says 30000 x 30000 and there is hardly anything behind it: only the header may be looked at."""
    data = bytearray(encoded(Pillow.new("RGB", (16, 16))))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", 30_000, 30_000)
    with pytest.raises(ValueError, match="max_pixels"):
        decode_field(bytes(data), "jpg")
    png = bytearray(encoded(Pillow.new("RGB", (16, 16)), "PNG"))
    png[16:24] = struct.pack(">II", 30_000, 30_000)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    with pytest.raises(ValueError, match=r"max_pixels|bomb"):
        decode_field(bytes(png), "png")


def test_a_raised_bound_is_obeyed_or_refused() -> None:
    """Pillow refuses above 179 million pixels on its own; a larger `max_pixels` must not be taken and then ignored."""
    try:
        args = DecodeArgs(max_pixels=400_000_000)
    except ValidationError:
        return
    png = bytearray(encoded(Pillow.new("RGB", (16, 16)), "PNG"))
    png[16:24] = struct.pack(">II", 15_000, 13_000)  # 195 million; of which hardly any are there
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    sample: Sample = {"mask": Encoded(memoryview(bytes(png)), "png")}
    with pytest.raises(ValueError, match=r"truncated|damaged"):
        decode(args)(sample, NO_DRAWS, None)


def test_a_named_field_of_a_data_set_object_is_decoded() -> None:
    jpeg, png = encoded(picture()), OTHERS["PNG"][0]
    for data in (jpeg, png):
        for given_as in (bytes, bytearray, memoryview):
            sample: Sample = {"image": given_as(data), "other": b"x"}
            decode(DecodeArgs(fields=("image",)))(sample, NO_DRAWS, None)
            assert_same(sample["image"].pixels, by_pillow(data))
            assert sample["other"] == b"x"
    sample = {"image": 7}
    with pytest.raises(ValueError, match=r"cannot decode int"):
        decode(DecodeArgs(fields=("image",)))(sample, NO_DRAWS, None)


def test_memory_to_reuse_is_only_a_place() -> None:
    """With memory to reuse, the next sample may overwrite the last one's pixels but never change its own result."""
    run = decode(DecodeArgs())
    scratch: dict[str, Any] = {}
    for size in [(97, 131), (40, 30), (150, 160), (97, 131)]:
        data = encoded(picture(*size))
        sample: Sample = {"image": Encoded(memoryview(data), "jpg")}
        run(sample, NO_DRAWS, scratch)
        assert_same(sample["image"].pixels, by_pillow(data))
    # Two images of one sample do not share it.
    first, second = encoded(picture(seed=1)), encoded(picture(seed=2))
    pair: Sample = {"a": Encoded(memoryview(first), "jpg"), "b": Encoded(memoryview(second), "jpg")}
    run(pair, NO_DRAWS, scratch)
    assert_same(pair["a"].pixels, by_pillow(first))
    assert_same(pair["b"].pixels, by_pillow(second))
    # Without, everything decoded stays.
    kept = [pixels_of(data) for data in (first, second)]
    assert_same(kept[0], by_pillow(first))
    assert_same(kept[1], by_pillow(second))
