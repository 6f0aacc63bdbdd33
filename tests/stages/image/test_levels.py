"""Levels of 16 bits, class numbers of few bits, and what Pillow does not read, against files written here byte by byte."""

from __future__ import annotations

import io
import logging
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, PngImagePlugin

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards.job import pack_job, unpack_job
from loaderkit.shards.planning import Options, plan_shards
from loaderkit.stages.image import levels
from loaderkit.stages.image.formats import pillow_limits, set_pillow_limits

INLINE = {"prefetch.executor": "inline"}
COLOURS = {0: 1, 2: 3, 4: 2, 6: 4}  # PNG's colour type -> channels


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(values: NDArray[Any], bits: int, *extra: bytes) -> bytes:
    """[H, W] or [H, W, C] as a PNG of so many bits a number."""
    height, width, *channels = values.shape
    colour = {(): 0, (2,): 4, (3,): 2, (4,): 6}[tuple(channels)]
    rows = values.reshape(height, -1)
    if bits == 16:
        packed = rows.astype(">u2").tobytes()
        lines = [packed[n : n + 2 * rows.shape[1]] for n in range(0, len(packed), 2 * rows.shape[1])]
    else:
        flat = np.unpackbits(rows.astype(np.uint8)[:, :, None], axis=2)[:, :, -bits:]
        lines = [line.tobytes() for line in np.packbits(flat.reshape(height, -1), axis=1)]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + line for line in lines)))
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *extra, data, chunk(b"IEND", b"")])


def tiff(values: NDArray[Any], *, bands: int = 1, planes: int = 1, photometric: int = 1) -> bytes:
    """An uncompressed TIFF of one strip a plane; numbers as the array has them."""
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    height, width = values.shape[:2] if planes == 1 else values.shape[1:]
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    extra = 8 + len(data)
    num_strips = 1 if planes == 1 else bands
    arrays = b"".join(struct.pack("<H", 8 * values.dtype.itemsize) for _ in range(bands))
    arrays += b"".join(struct.pack("<H", kind) for _ in range(bands))
    strips = extra + len(arrays)
    size = len(data) // num_strips
    arrays += struct.pack(f"<{num_strips}I", *(8 + n * size for n in range(num_strips)))
    arrays += struct.pack(f"<{num_strips}I", *[size] * num_strips)

    def entry(tag: int, kind: int, *values: int, at: int = 0) -> bytes:
        """`values` of a kind (3: 16 bits, 4: 32 bits), which stand in the entry if they fit, else `at`."""
        packed = struct.pack(f"<{len(values)}{'H' if kind == 3 else 'I'}", *values)
        return struct.pack("<HHI", tag, kind, len(values)) + (
            packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<I", at)
        )

    bits = 8 * values.dtype.itemsize
    begins, sizes = [8 + n * size for n in range(num_strips)], [size] * num_strips
    entries = [
        entry(256, 4, width),
        entry(257, 4, height),
        entry(258, 3, *[bits] * bands, at=extra),
        entry(259, 3, 1),
        entry(262, 3, photometric),
        entry(273, 4, *begins, at=strips),
        entry(277, 3, bands),
        entry(278, 4, height),
        entry(279, 4, *sizes, at=strips + 4 * num_strips),
        entry(284, 3, planes),
        entry(339, 3, *[kind] * bands, at=extra + 2 * bands),
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, extra + len(arrays)) + data + arrays + directory


def first(folder: Path, name: str, data: bytes, **decode: Any) -> torch.Tensor:
    (folder / name).write_bytes(data)
    made = Pipeline.files(str(folder), include=name).read().decode(**decode).batch(1)
    with loaderkit.build(made, overrides=INLINE) as loader:
        image: torch.Tensor = next(iter(loader))["image"][0]
        return image


def grey16(rng: Any, most: int) -> NDArray[np.uint16]:
    values = [[rng.randint(0, most) for _ in range(9)] for _ in range(7)]
    return np.array(values, np.uint16)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    levels._say_scale.cache_clear()
    caplog.set_level(logging.WARNING, "loaderkit")
    return caplog


@pytest.mark.parametrize("most", [200, 4095, 65535])
@pytest.mark.parametrize("write", [lambda values: png(values, 16), tiff])
def test_sixteen_bits_have_one_scale_whatever_the_picture(
    most: int, write: Any, tmp_path: Path, rng: Any, said: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        values = grey16(rng, most)
        found = first(tmp_path, f"{number}.png", write(values))
        assert torch.equal(found, torch.from_numpy((values >> 8).astype(np.uint8)).expand(3, -1, -1))
    assert said.text.count("16 bits are read as 8") == 1
    kept = first(tmp_path, "kept.png", write(values), depth=16)
    assert kept.dtype == torch.uint16
    assert np.array_equal(kept.numpy(), np.broadcast_to(values, (3, *values.shape)))
    mask = first(tmp_path, "mask.png", write(values), depth=16, masks=["image"])
    assert np.array_equal(mask.numpy()[0], values)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_of_which_0_is_white(dtype: Any, tmp_path: Path, rng: Any) -> None:
    """A picture is turned round, class numbers are not."""
    most = np.iinfo(dtype).max
    values = grey16(rng, most).astype(dtype)
    for depth in (8, 16):
        levels: Any = (most - values).astype(np.uint16)
        levels = levels * np.uint16(257) if most == 255 and depth == 16 else levels
        levels = levels >> 8 if most > 255 and depth == 8 else levels
        found = first(tmp_path, "a.tif", tiff(values, photometric=0), depth=depth).numpy()
        assert np.array_equal(found, np.broadcast_to(levels.astype(found.dtype), (3, *values.shape)))
    mask = first(tmp_path, "b.tif", tiff(values, photometric=0), depth=8 if most == 255 else 16, masks=["image"])
    assert np.array_equal(mask.numpy()[0], values)


def jpeg2000(values: NDArray[Any], bits: int) -> bytes:
    """A codestream whose header says `bits` for each number."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, "JPEG2000", no_jp2=True)
    data = bytearray(file.getvalue())
    data[42] = bits - 1
    return bytes(data)


def test_jpeg_2000_of_other_bits(tmp_path: Path, rng: Any) -> None:
    """Pillow spreads them: right for a picture, and not for class numbers."""
    values = grey16(rng, 255).astype(np.uint8)
    assert np.array_equal(first(tmp_path, "a.j2k", jpeg2000(values, 8), masks=["image"]).numpy()[0], values)
    deep = grey16(rng, 65535)
    assert np.array_equal(first(tmp_path, "b.j2k", jpeg2000(deep, 16), masks=["image"], depth=16).numpy()[0], deep)
    for bits in (1, 4, 7):
        with pytest.raises(StageError, match=rf"its numbers have {bits} bits"):
            first(tmp_path, "c.j2k", jpeg2000(values, bits), masks=["image"])
    with pytest.raises(StageError, match="signed"):
        first(tmp_path, "d.j2k", jpeg2000(values, 0x80 + 8))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_transparent_level_of_a_grey_png(bits: int, tmp_path: Path, rng: Any) -> None:
    values = grey16(rng, 2**bits - 1)
    key = int(values[3, 4])
    data = png(values, bits, chunk(b"tRNS", struct.pack(">H", key)))
    alpha = first(tmp_path, "a.png", data, channels=4)[3]
    assert np.array_equal(alpha.numpy(), np.where(values == key, 0, 255))


def test_masks_of_one_bit(tmp_path: Path, rng: Any) -> None:
    """In a PBM 1 is black, and in a TIFF 0 may be white."""
    values = np.array([[rng.randint(0, 1) for _ in range(16)] for _ in range(7)], np.uint8)
    packed = np.packbits(values, axis=1)
    files = {"a.pbm": b"P4 16 7\n" + packed.tobytes()}
    for photometric in (0, 1):
        file = io.BytesIO()
        Image.fromarray(values.astype(bool) ^ (photometric == 0)).save(file, "tiff", tiffinfo={262: photometric})
        files[f"{photometric}.tif"] = file.getvalue()
    for name, data in files.items():
        assert np.array_equal(first(tmp_path, name, data, masks=["image"]).numpy()[0], values)


def test_colours_of_sixteen_bits(tmp_path: Path, rng: Any, said: pytest.LogCaptureFixture) -> None:
    values = np.stack([grey16(rng, 65535) for _ in range(3)], 2)
    planes = np.ascontiguousarray(values.transpose(2, 0, 1))
    for name, data in (("a.png", png(values, 16)), ("a.tif", tiff(values, bands=3, photometric=2))):
        levels._say_scale.cache_clear()
        said.clear()
        found = first(tmp_path, name, data)
        assert np.array_equal(found.numpy(), planes >> 8)
        assert "16 bits are read as 8" in said.text
        with pytest.raises(StageError, match=r"store it as \.npy"):
            first(tmp_path, name, data, depth=16)
    with pytest.raises(StageError, match="planes, which Pillow reads wrongly"):
        first(tmp_path, "b.tif", tiff(planes, bands=3, planes=2, photometric=2))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint32", "float32"])
def test_numbers_that_are_no_levels_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"store it as \.npy") as caught:
        first(tmp_path, "a.tif", tiff(np.arange(12).reshape(3, 4).astype(dtype)))
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks_keep_their_class_numbers(bits: int, tmp_path: Path, rng: Any) -> None:
    values = np.array([[rng.randrange(2**bits) for _ in range(13)] for _ in range(5)], np.uint8)
    for depth in (8, 16):
        found = first(tmp_path, "a.png", png(values, bits), masks=["image"], depth=depth)
        assert found.tolist() == [values.tolist()]
    shown = first(tmp_path, "b.png", png(values, bits))  # as a picture, white is 255
    assert np.array_equal(shown.numpy()[0], values * (255 // (2**bits - 1)))


def test_masks_of_a_ppm_keep_their_class_numbers(tmp_path: Path, rng: Any) -> None:
    for most in (1, rng.randrange(2, 255), 255):
        values = np.array([[rng.randint(0, most) for _ in range(9)] for _ in range(5)], np.uint8)
        data = f"P5 9 5 {most}\n".encode() + values.tobytes()
        assert first(tmp_path, "a.ppm", data, masks=["image"]).tolist() == [values.tolist()]
    deep = grey16(rng, most := rng.randrange(256, 65535))
    data = f"P5 9 7 {most}\n".encode() + deep.astype(">u2").tobytes()
    assert first(tmp_path, "b.ppm", data, masks=["image"], depth=16).tolist() == [deep.tolist()]


def test_the_stages_that_take_sixteen_bits(tmp_path: Path, rng: Any) -> None:
    values = np.array([[rng.randrange(65536) for _ in range(40)] for _ in range(30)], np.uint16)
    (tmp_path / "a.png").write_bytes(png(values, 16))
    (tmp_path / "b.jpg").write_bytes(jpeg := jpeg_of(values))
    made = Pipeline.files(str(tmp_path)).shuffle(False).read().decode(depth=16)
    cropped = made.center_crop([20, 30]).random_vertical_flip(p=1).batch(1).normalize(mean=[0.25], std=[0.5])
    with loaderkit.build(cropped, overrides=INLINE) as loader:
        deep, shallow = (batch["image"][0, 0] for batch in loader)
    expected = values[5:25, 5:35][::-1]
    assert torch.allclose(deep, torch.from_numpy((expected / 65535 - 0.25) / 0.5).float(), atol=1e-6)
    pixels = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))[5:25, 5:35, 0][::-1]
    assert torch.allclose(shallow, torch.from_numpy((pixels / 255 - 0.25) / 0.5).float(), atol=1e-6)
    with loaderkit.build(made.resize([15, 20]).batch(2), overrides=INLINE) as loader:
        small = next(iter(loader))["image"]
    assert small.dtype == torch.uint16
    assert abs(small[0, 0].float().mean().item() - values.mean()) < 0.02 * values.mean()
    with pytest.raises(ConfigError, match=r"`color_jitter` takes images of 8 bits"):
        loaderkit.build(made.color_jitter(brightness=0.1).batch(2))


def jpeg_of(values: NDArray[np.uint16]) -> bytes:
    file = io.BytesIO()
    Image.fromarray((values >> 8).astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.mark.parametrize("bands", [2, 5, 8])
def test_bands_that_make_no_rgb_are_no_damage(bands: int, tmp_path: Path) -> None:
    data = tiff(np.zeros((4, 6, bands), np.uint8), bands=bands, photometric=1)
    with pytest.raises(StageError, match=rf"Pillow does not read.*{bands} bands of 8 bits.*\.npy") as caught:
        first(tmp_path, "a.tif", data)
    assert "damaged" not in str(caught.value)
    with pytest.raises(StageError, match=r"damaged|truncated"):
        first(tmp_path, "b.tif", data[: len(data) // 2])


def test_large_metadata_is_a_limit_of_pillows_that_loading_processes_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1)))
    data = png(np.zeros((4, 4), np.uint8), 8, text)
    with pytest.raises(
        StageError, match=r"more metadata than Pillow allows.*raise PIL\.PngImagePlugin\.MAX_TEXT_CHUNK"
    ):
        first(tmp_path, "a.png", data)
    with monkeypatch.context() as patched:
        patched.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 2 * PngImagePlugin.MAX_TEXT_CHUNK)
        patched.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        limits = pillow_limits()
        assert first(tmp_path, "a.png", data).shape == (3, 4, 4)
        made = Pipeline.files(str(tmp_path)).read().decode().batch(1)
        with loaderkit.build(made, overrides={"prefetch.executor": "process"}) as loader:
            assert next(iter(loader))["image"].shape == (1, 3, 4, 4)
        planned = plan_shards(to_config(made), Options(f"{tmp_path}-out"))
        job = pack_job(planned.job)
        planned.job.plan.close()
    before = pillow_limits()
    set_pillow_limits(limits)
    assert ImageFile.LOAD_TRUNCATED_IMAGES
    set_pillow_limits(before)
    assert pillow_limits() == before
    unpack_job(job).plan.close()  # in a process that makes shards
    assert pillow_limits() == limits
    set_pillow_limits(before)
