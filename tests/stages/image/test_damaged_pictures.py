"""Damaged pictures of every kind: each is a picture still, or fails in words, in memory that fits its size."""

from __future__ import annotations

import io
import random
import re
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from conftest import make_photo
from memory_peak import forget_peak, peak_bytes
from mutate import mutations
from odd_jpegs import ODD
from PIL import Image as Pillow

from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, Image
from loaderkit.stages.image.decode import DecodeArgs, Decoder
from loaderkit.stages.image.ops import Crop, DecodeNeed

MAX_PIXELS = 500_000
MIB = 2**20


def encoded(image: Pillow.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.copy().save(buffer, kind, **options)
    return buffer.getvalue()


def make_pictures() -> dict[str, bytes]:
    colour = Pillow.open(io.BytesIO(make_photo(3))).convert("RGB").resize((67, 49))
    alpha = colour.copy()
    alpha.putalpha(Pillow.linear_gradient("L").resize(colour.size))
    palette, grey, bits = colour.quantize(64), colour.convert("L"), colour.convert("1")
    deep = Pillow.fromarray(np.asarray(grey).astype(np.uint16) * 250)
    exif = Pillow.Exif()
    exif[0x0112], exif[0x010F], exif[0x8769] = 6, "maker", {0x9003: "2020:01:01 00:00:00"}

    def animated(image: Pillow.Image, kind: str) -> bytes:
        return encoded(image, kind, save_all=True, append_images=[image.rotate(30), image.rotate(60)])

    return {
        "JPEG": encoded(colour, "JPEG"),
        "JPEG, progressive": encoded(colour, "JPEG", progressive=True),
        "JPEG, CMYK": encoded(colour.convert("CMYK"), "JPEG"),
        "JPEG, EXIF": encoded(colour, "JPEG", exif=exif, dpi=(72, 72), icc_profile=b"x" * 99, comment=b"hello"),
        "JPEG, grey": encoded(grey, "JPEG"),
        "JPEG, restarts": encoded(colour, "JPEG", restart_marker_blocks=3),
        "MPO": animated(colour, "MPO"),
        **{f"JPEG, {name}": data for name, data in ODD.items()},
        "PNG": encoded(colour, "PNG"),
        "PNG, 1 bit": encoded(bits, "PNG"),
        "PNG, 16 bits": encoded(deep, "PNG"),
        "PNG, palette": encoded(palette, "PNG", transparency=3),
        "PNG, alpha": encoded(alpha, "PNG"),
        "PNG, EXIF": encoded(colour, "PNG", exif=exif, dpi=(72, 72), icc_profile=b"x" * 99),
        "PNG, animated": animated(colour, "PNG"),
        "PNG, interlaced": interlaced(np.asarray(grey)),
        "WebP, lossy": encoded(colour, "WEBP", exif=exif),
        "WebP, lossless": encoded(alpha, "WEBP", lossless=True),
        "WebP, animated": animated(colour, "WEBP"),
        "GIF": encoded(palette, "GIF", transparency=5),
        "GIF, animated": animated(colour, "GIF"),
        "BMP": encoded(colour, "BMP"),
        "BMP, palette": encoded(palette, "BMP"),
        **{
            f"TIFF, {name}": encoded(colour, "TIFF", compression=name)
            for name in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma")
        },
        "TIFF, fax": encoded(bits, "TIFF", compression="group4"),
        "TIFF, 16 bits": encoded(deep, "TIFF"),
        "TIFF, CMYK": encoded(colour.convert("CMYK"), "TIFF", compression="tiff_lzw"),
        "TIFF, LAB": encoded(Pillow.new("LAB", (9, 9)), "TIFF"),
        "TIFF, YCbCr": encoded(colour.convert("YCbCr"), "TIFF", compression="jpeg"),
        "TIFF, palette": encoded(palette, "TIFF"),
        "TIFF, float": encoded(grey.convert("F"), "TIFF"),
        "TIFF, pages": animated(colour, "TIFF"),
        "PPM": encoded(colour, "PPM"),
        "PGM, 16 bits": encoded(deep, "PPM"),
        "PPM, text": b"P3\n4 4\n255\n" + b"1 2 3 " * 16,
        "AVIF": encoded(colour, "AVIF", exif=exif),
        "AVIF, alpha": encoded(alpha, "AVIF"),
        "AVIF, animated": animated(colour, "AVIF"),
        "JPEG 2000": encoded(colour, "JPEG2000"),
        "JPEG 2000, bare": encoded(alpha, "JPEG2000", no_jp2=True),
    }


def interlaced(grey: np.ndarray[Any, Any]) -> bytes:
    """A PNG in seven passes, which Pillow does not write: (first row, first column, rows apart, columns apart) of each."""
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = [b"\0" + row.tobytes() for top, left, down, across in passes for row in grey[top::down, left::across]]
    height, width = grey.shape
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 1])
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in chunks
    )


PICTURES = make_pictures()


def half(height: int, width: int, _: Any) -> DecodeNeed:
    return DecodeNeed(Crop(height // 4, width // 4, -(-height // 2), -(-width // 2)))


DECODERS = {
    "whole": Decoder(DecodeArgs(max_pixels=MAX_PIXELS)),
    "piece": Decoder(DecodeArgs(max_pixels=MAX_PIXELS), half),
    "upright": Decoder(DecodeArgs(max_pixels=MAX_PIXELS, exif_orientation=True)),
    "mask": Decoder(DecodeArgs(max_pixels=MAX_PIXELS, masks=("image",))),
}


def outcome(decoder: Decoder, data: bytes) -> Image | BaseException:
    sample: Sample = {"image": Encoded(memoryview(data), "jpg")}
    errors: list[BaseException] = []
    try:
        left = decoder.begin(sample, None, {})
    except ValueError as error:
        return error
    if left:
        chunk = SampleChunk(
            BatchWork(epoch=0, step=0, positions=np.arange(1), indices=np.arange(1)), 0, 1, np.arange(1)
        )
        chunk.samples = [sample]
        decoder.finish(chunk, [(0, piece) for piece in left], lambda chunk, place, error: errors.append(error))
    found: Image = sample["image"]
    return errors[0] if errors else found


def check(name: str, data: bytes) -> bool:
    """Whether all ways refuse it."""
    num_refused = 0
    for way, decoder in DECODERS.items():
        forget_peak()
        before_bytes = peak_bytes("VmRSS")
        found = outcome(decoder, data)
        took_bytes = peak_bytes("VmHWM") - before_bytes
        assert took_bytes <= 20 * len(data) + 64 * MIB, f"{name}, {way}: {took_bytes} bytes"
        if isinstance(found, Image):
            assert found.pixels.dtype == np.uint8
            assert found.pixels.shape[2] == (1 if way == "mask" else 3)
            assert found.pixels.shape[0] * found.pixels.shape[1] <= MAX_PIXELS
            continue
        num_refused += 1
        assert type(found) is ValueError, f"{name}, {way}: {found!r}"
        text = str(found)
        assert re.match(
            r"(truncated|damaged) [A-Z0-9]+ \(|not an image|the (image|file) is|too large|a |Pillow does|its (num|col)",
            text,
        )
        if text.startswith(("truncated", "damaged", "not an")):
            assert f"({len(data)} bytes" in text
    return num_refused == len(DECODERS)


def run(num_each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_refused = 0
    for name, data in PICTURES.items():
        for number in range(num_each):
            damaged = mutations(data, rng)
            with warnings.catch_warnings():
                warnings.simplefilter("error" if number % 4 == 0 else "ignore")  # as errors, warnings are bad samples
                num_refused += check(name, damaged)
    assert num_refused > 0.2 * num_each * len(PICTURES)


def test_whole_ones_are_read() -> None:
    for name, data in PICTURES.items():
        assert isinstance(outcome(DECODERS["whole"], data), Image) != (name == "TIFF, float"), name


@pytest.mark.parametrize(("size", "tile", "is_read"), [(255, 1, False), (500, 4, False), (500, 8, True), (60, 1, True)])
@pytest.mark.parametrize("name", ["JPEG 2000", "JPEG 2000, bare"])
def test_tiny_tiles_take_no_memory(name: str, size: int, tile: int, is_read: bool) -> None:
    """65,025 tiles would take 800 MB."""
    data = bytearray(PICTURES[name])
    at = data.index(b"\xff\x4f\xff\x51")
    data[at + 8 : at + 16] = struct.pack(">2I", size, size)
    data[at + 24 : at + 32] = struct.pack(">2I", tile, tile)
    if name == "JPEG 2000":
        at = data.index(b"ihdr")
        data[at + 4 : at + 12] = struct.pack(">2I", size, size)
    assert check(name, bytes(data)) != is_read


def test_some_hundred_damaged_ones(rng: random.Random) -> None:
    run(12, rng.randrange(2**32))


@pytest.mark.prove
def test_many_damaged_ones(rng: random.Random) -> None:
    run(800, rng.randrange(2**32))
