"""Which pictures are opened, and what `decode` makes of those that Pillow takes for whole and that are not."""

from __future__ import annotations

import io
import os
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_photo
from numpy.typing import NDArray
from odd_jpegs import ODD
from PIL import Image as Pillow
from PIL import features

import loaderkit
from loaderkit import Pipeline, native
from loaderkit.cli import main
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError
from loaderkit.native.jpegs import is_cut
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.pictures import FORMATS, Format
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded
from loaderkit.stages.image import formats as pictures
from loaderkit.stages.image.decode import DecodeArgs, Decoder
from loaderkit.stages.image.ops import Crop, DecodeNeed

Pixels = NDArray[np.uint8]
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\nshowpage\n%%EOF\n"
EVERY_PLUGIN = {"jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "avif", "jpeg2000"}
WAYS = ["whole", "piece", "Pillow"]
END = b"\xff\xd9"


def decoded(data: bytes, way: str = "whole", extension: str = "jpg", **args: Any) -> Pixels:
    """The pixels by one of the ways there are for JPEGs: in whole, a piece for a crop, through Pillow."""
    if way == "Pillow":
        args["exif_orientation"] = True
    decoder = Decoder(
        DecodeArgs(**args), (lambda h, w, _: DecodeNeed(Crop(1, 2, h - 3, w - 5))) if way == "piece" else None
    )
    sample: Sample = {"image": Encoded(memoryview(data), extension)}
    left = [(0, piece) for piece in decoder.begin(sample)]
    chunk = SampleChunk(BatchWork(epoch=0, step=0, positions=np.arange(1), indices=np.arange(1)), 0, 1, np.arange(1))
    chunk.samples = [sample]
    errors: list[BaseException] = []
    if left:
        decoder.finish(chunk, left, lambda chunk, place, error: errors.append(error))
    if errors:
        raise errors[0]
    pixels: Pixels = sample["image"].pixels
    return pixels


def by_pillow(data: bytes) -> Pixels:
    with Pillow.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def assert_as_pillow(data: bytes, way: str) -> None:
    found, expected = decoded(data, way), by_pillow(data)
    if way == "piece" and found.shape != expected.shape:
        expected = expected[1:-2, 2:-3]
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 1


def encoded(image: Pillow.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.copy().save(buffer, kind, **options)
    return buffer.getvalue()


def photo() -> Pillow.Image:
    return Pillow.open(io.BytesIO(make_photo(3))).convert("RGB")


ONE_OF_EACH: dict[Format, bytes] = {name: encoded(photo(), name.upper()) for name in FORMATS}

# --------------------------------------------------------------------------------------------------- the closed list


def test_the_list_is_closed() -> None:
    """A new format needs a look at what its plugin starts and reads."""
    assert set(FORMATS) == EVERY_PLUGIN


@pytest.mark.parametrize("name", FORMATS)
def test_each_is_opened_alone_and_told_by_its_bytes(name: Format) -> None:
    data = ONE_OF_EACH[name]
    for extension in ("jpg", "png"):
        assert np.array_equal(decoded(data, extension=extension, formats=[name]), by_pillow(data))
    others = [other for other in FORMATS if other != name]
    for way in WAYS:
        with pytest.raises(
            ValueError, match=rf"seems to be {name} \({len(data)} bytes\), .*only {', '.join(others)}: add {name}"
        ):
            decoded(data, way, formats=others)


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called gs that leaves a file, whose path this is."""
    trace = tmp_path / "was-started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho >> {trace}\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return trace


class Fields:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": POSTSCRIPT}


def postscript_ways() -> dict[str, Pipeline]:
    files = Pipeline.files("memory://", include="*")
    return {
        "by extension": files.read().decode().resize([8, 8]),
        "for a crop": files.read().decode().random_resized_crop(8),
        "upright": files.read().decode(exif_orientation=True).resize([8, 8]),
        "a mask": files.read().decode(masks=["image"]).resize([8, 8]),
        "dali-cpu": files.read().decode(device="dali-cpu").resize([8, 8]),
        "a field of bytes": Pipeline.dataset(Fields()).read().decode(fields=["image"]).resize([8, 8]),
    }


@pytest.mark.parametrize("way", postscript_ways())
@pytest.mark.parametrize("extension", ["jpg", "png", "tif"])
def test_postscript_is_not_run(way: str, extension: str, ghostscript: Path) -> None:
    if way == "dali-cpu":
        pytest.importorskip("nvidia.dali")
    with (
        pytest.raises(StageError, match=r"seems to be PostScript \(\d+ bytes\), and only jpeg, png.* are: convert it"),
        loaderkit.build(
            postscript_ways()[way].batch(1),
            connectors={"memory": MemoryConnector({f"a.{extension}": POSTSCRIPT})},
            overrides={"prefetch.executor": "inline"},
        ) as loader,
    ):
        list(loader)
    assert not ghostscript.exists()


def test_postscript_would_have_been_run(ghostscript: Path) -> None:
    """The test above can fail: this is what Pillow does when it is left alone."""
    program = "import io, sys; from PIL import Image; Image.open(io.BytesIO(sys.stdin.buffer.read())).load()"
    subprocess.run([sys.executable, "-c", program], input=POSTSCRIPT, capture_output=True, check=False)
    assert ghostscript.exists()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n<svg xmlns='http://www.w3.org/2000/svg'>", "SVG or XML"),
        (b"%PDF-1.7", "PDF"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\1\0\1\0", "an icon"),
        (zlib.compress(b"x", wbits=31), "gzip"),
        (b"\xff\xd8\xff", r"JPEG \(3 bytes: its header cannot be read"),
        (b"hello world", r"known format \(11 bytes, beginning b'hello wo'\)"),
    ],
)
def test_what_it_seems_to_be(data: bytes, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        decoded(data)


def test_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jpg").write_bytes(POSTSCRIPT)
    (tmp_path / "p.yaml").write_text(
        "source: {kind: files, url: ., include: '*.jpg'}\nstages: [read, decode: {formats: [jpeg]}, batch: {size: 1}]\n"
    )
    assert main(["check", str(tmp_path / "p.yaml")]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "seems to be PostScript" in text
    assert "only jpeg are: convert it, or leave it out" in text


def test_pillow_may_lack_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.features.check", lambda name: name != "avif")
    pictures.available.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"seems to be avif .* this Pillow was built without"):
            decoded(ONE_OF_EACH["avif"])
        assert decoded(ONE_OF_EACH["webp"]).size
    finally:
        pictures.available.cache_clear()


# ------------------------------------------------------------------------------------------------------ `formats`


def pipeline(formats: Any, **args: Any) -> Pipeline:
    return (
        Pipeline.files("memory://", include="*").read().decode(formats=formats, **args).random_resized_crop(8).batch(6)
    )


@pytest.mark.parametrize("device", ["cpu", "dali-cpu"])
def test_a_shorter_list_holds_for_jpegs_too(device: str) -> None:
    if device == "dali-cpu":
        pytest.importorskip("nvidia.dali")
    files = {"a.jpg": ONE_OF_EACH["jpeg"], "b.jpg": ONE_OF_EACH["png"], "c.png": ONE_OF_EACH["jpeg"]}
    for formats, good in ((["png"], {"b.jpg"}), (["jpeg"], {"a.jpg", "c.png"}), (["png", "jpeg"], set(files))):
        with loaderkit.build(
            pipeline(formats, device=device),
            connectors={"memory": MemoryConnector(files)},
            overrides={
                "prefetch.executor": "inline",
                "order.epochs": 1,
                "errors.on_bad_sample": "skip",
                "order.shuffle": "none",
            },
        ) as loader:
            assert {key for batch in loader for key in batch["__key__"]} == good


def test_a_field_of_bytes_obeys_it() -> None:
    decoder = Decoder(DecodeArgs(fields=("x",), formats=("png",)))
    for data, is_good in ((ONE_OF_EACH["png"], True), (ONE_OF_EACH["jpeg"], False)):
        sample: Sample = {"x": data}
        if is_good:
            decoder.begin(sample)
            assert np.array_equal(sample["x"].pixels, by_pillow(data))
        else:
            with pytest.raises(ValueError, match="seems to be jpeg"):
                decoder.begin(sample)


def test_wrong_formats_are_errors_of_the_description() -> None:
    with pytest.raises(
        ConfigError, match=r"stages\.decode\.formats.*not 'jpg'; did you mean 'jpeg'\?|did you mean 'jpeg'"
    ):
        _ = pipeline(["jpg"]).config
    with pytest.raises(ConfigError, match="at least 1 items"):
        _ = pipeline([]).config
    with pytest.raises(ConfigError, match="expected"):
        _ = pipeline(["eps"]).config


def test_formats_are_no_part_of_a_state() -> None:
    """A sample has the same bytes or none, as with `max_pixels`: a list that grows does not end a training."""
    files = {f"{n}.jpg": make_photo(n) for n in range(12)}
    options: dict[str, Any] = {
        "connectors": {"memory": MemoryConnector(files)},
        "overrides": {"prefetch.executor": "inline"},
    }
    with loaderkit.build(pipeline(["jpeg"]), **options) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        second = next(batches)["__key__"]
    with loaderkit.build(pipeline(["jpeg", "png"]), **options) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["__key__"] == second


# ------------------------------------------------------------------------------- where Pillow reads, and where we do


def jpegs() -> dict[str, bytes]:
    image = photo()
    return {
        "baseline": encoded(image, "JPEG"),
        "progressive": encoded(image, "JPEG", progressive=True),
        "grey": encoded(image.convert("L"), "JPEG"),
        "CMYK": encoded(image.convert("CMYK"), "JPEG"),
        "MPO": encoded(image, "MPO", save_all=True, append_images=[image.rotate(90)]),
        "chroma 4:1:1": encoded(image, "JPEG", subsampling="4:1:1"),
        **ODD,
    }


JPEGS = jpegs()
HUFFMAN = [name for name in JPEGS if name not in ("arithmetic coding", "MPO")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", JPEGS)
def test_odd_jpegs_are_read_as_pillow_reads_them(name: str, way: str) -> None:
    for tail in (b"", b"\0" * 5000, b"\r\n", JPEGS["baseline"]):
        assert_as_pillow(JPEGS[name] + tail, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in JPEGS if name != "MPO"])
def test_without_its_end_marker_a_jpeg_is_truncated(name: str, way: str) -> None:
    """Pillow reads some of these, where anything at all follows: a file whose last blocks were never written, say."""
    data = JPEGS[name]
    assert data.endswith(END)
    for cut in (1, 2, 3, 12):
        for tail in (b"", b"\0" * 10, b"\0" * 5000, b"text"):
            with pytest.raises(ValueError, match=r"truncated|damaged JPEG"):
                decoded(data[:-cut] + tail, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HUFFMAN)
def test_cut_and_closed_again_is_truncated(name: str, way: str) -> None:
    """Pillow fills up what is missing with grey."""
    data = JPEGS[name]
    start = data.rindex(b"\xff\xda")
    num_read = 0
    for end in {*np.linspace(start + 14, len(data) - 4, 12).astype(int).tolist()}:
        closed = data[:end].rstrip(b"\xff") + END
        try:
            by_pillow(closed)
            num_read += 1
        except OSError:
            pass
        with pytest.raises(ValueError, match=r"truncated|damaged"):
            decoded(closed, way)
    assert num_read


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_can_tell_is_read(way: str) -> None:
    """Arithmetic coding has no sign for an end that is too early, and a progressive file is one after any scan."""
    data = ODD["arithmetic coding"]
    assert_as_pillow(data[:-20] + END, way)
    data = JPEGS["progressive"]
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xc4"]  # tables come before each scan
    assert_as_pillow(data[: scans[-1]] + END, way)


@pytest.mark.parametrize("way", WAYS)
def test_without_libjpeg_only_the_first_complaint_is_known(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HAS_JPEG", False)
    monkeypatch.setattr(native, "is_cut", is_cut)
    for name in ("baseline", "grey", "CMYK", "chroma 4:4:1", "YCCK"):
        data = JPEGS[name]
        if way != "piece":
            assert_as_pillow(data, way)
        with pytest.raises(ValueError, match="truncated"):
            decoded(data[: len(data) * 9 // 10].rstrip(b"\xff") + END, way)


def test_a_missing_end_is_the_same_on_dali() -> None:
    pytest.importorskip("nvidia.dali")
    data = JPEGS["baseline"]
    files = {
        "whole": data,
        "no end": data[:-2],
        "half an end": data[:-1],
        "filled up": data[:-2] + bytes(99),
        "more": data + bytes(99),
    }
    for device in ("cpu", "dali-cpu"):
        with loaderkit.build(
            pipeline(["jpeg"], device=device),
            connectors={"memory": MemoryConnector({f"{name}.jpg": data for name, data in files.items()})},
            overrides={"prefetch.executor": "inline", "order.epochs": 1, "errors.on_bad_sample": "skip"},
        ) as loader:
            assert {key for batch in loader for key in batch["__key__"]} == {"whole.jpg", "more.jpg"}


# -------------------------------------------------------------------------------------------------------------- EXIF


def with_exif(payload: bytes) -> bytes:
    data = JPEGS["baseline"]
    return data[:2] + b"\xff\xe1" + (len(payload) + 8).to_bytes(2, "big") + b"Exif\0\0" + payload + data[2:]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"II",
        b"XX*\0\x08\0\0\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12" * 9,
        b"\xff" * 300,
    ],
    ids=["empty", "begun", "no order", "elsewhere", "too long", "garbage"],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_exif_that_cannot_be_read_says_nothing(payload: bytes, way: str) -> None:
    assert_as_pillow(with_exif(payload), way)


def test_a_tag_that_cannot_be_written_again_does_not_keep_a_picture_from_being_turned() -> None:
    """`ImageOps.exif_transpose` writes the EXIF anew, which it can only do if all of that is sound."""
    entries = [(0x0112, 3, 1, b"\6\0\0\0"), (0x011A, 2, 1, b"\xff\xff\0\0"), (0xEEEE, 13, 1, b"\1\0\0\0")]
    ifd = len(entries).to_bytes(2, "little") + b"".join(
        tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + num.to_bytes(4, "little") + value
        for tag, kind, num, value in entries
    )
    data = with_exif(b"II*\0\x08\0\0\0" + ifd + bytes(4))
    with Pillow.open(io.BytesIO(JPEGS["baseline"])) as image:
        expected = np.asarray(image.transpose(Pillow.Transpose.ROTATE_270))
    assert np.array_equal(decoded(data, exif_orientation=True), expected)


def test_tiff_is_always_upright() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    data = encoded(photo(), "TIFF", exif=exif)
    expected = np.asarray(photo().transpose(Pillow.Transpose.ROTATE_270))
    for upright in (False, True):
        assert np.array_equal(decoded(data, extension="tif", exif_orientation=upright), expected)


# ------------------------------------------------------------------------------------------------------------- tiles


def jpeg2000(side: int, tile: int, *boxes: bytes) -> bytes:
    """64 x 64 pixels whose header says `side` and `tile`, with boxes in front of its codestream."""
    file = io.BytesIO()
    Pillow.new("RGB", (64, 64), (1, 2, 3)).save(file, "JPEG2000")
    data = bytearray(file.getvalue())
    struct.pack_into(">II", data, data.index(b"ihdr") + 4, side, side)
    struct.pack_into(">8I", data, data.index(b"\xff\x4f\xff\x51") + 8, side, side, 0, 0, tile, tile, 0, 0)
    begin = data.index(b"jp2c") - 4
    return bytes(data[:begin] + b"".join(boxes) + data[begin:])


def box(side: int, tile: int, *, is_long: bool) -> bytes:
    """One that no decoder reads, with what looks like a codestream."""
    inside = bytes(16) + b"\xff\x4f\xff\x51" + struct.pack(">HH8I", 47, 0, side, side, 0, 0, tile, tile, 0, 0)
    return (
        struct.pack(">I4sQ", 1, b"uuid", 16 + len(inside)) if is_long else struct.pack(">I4s", 8 + len(inside), b"uuid")
    ) + inside


@pytest.mark.skipif(not features.check("jpg_2000"), reason="needs a Pillow with JPEG 2000")
@pytest.mark.parametrize("is_long", [False, True])
def test_only_the_codestream_says_what_tiles_a_jpeg_2000_has(is_long: bool) -> None:
    for decoys in ((), (box(64, 64, is_long=is_long),)):
        with pytest.raises(ValueError, match="cuts it into 65025 tiles"):
            decoded(jpeg2000(255, 1, *decoys), extension="jp2")
    whole = decoded(jpeg2000(64, 64, box(60_000, 1, is_long=is_long)), extension="jp2")
    assert np.array_equal(whole, decoded(jpeg2000(64, 64), extension="jp2"))


def tiff(size: int, tile: int) -> bytes:
    """A corner of one tile of zeros."""
    packed = zlib.compress(bytes(tile * tile), 9)
    entries = {256: size, 257: size, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(packed)}
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(entries)) + fields + bytes(4)


def test_a_tiff_takes_no_tile_far_larger_than_itself() -> None:
    assert decoded(tiff(3, 256), extension="tif").shape[:2] == (3, 3)
    assert decoded(tiff(2000, 2048), extension="tif").shape[:2] == (2000, 2000)
    with pytest.raises(ValueError, match="tiles of 8192 x 8192"):
        decoded(tiff(1, 8192), extension="tif")


# ------------------------------------------------------------------------------------------------- other odd contents


def test_pillows_own_images_are_loaded_in_words() -> None:
    data = ONE_OF_EACH["png"]
    sample: Sample = {"image": Pillow.open(io.BytesIO(data[: len(data) // 2]))}
    with pytest.raises(ValueError, match=r"Pillow's image cannot be loaded: .*truncated"):
        Decoder(DecodeArgs(fields=("image",))).begin(sample)


@pytest.mark.parametrize(
    ("extension", "data", "words"),
    [
        ("json", b"[" * 100_000, r"not JSON \(100000 bytes\): maximum recursion"),
        ("json", b"{", r"not JSON \(1 bytes\)"),
        ("json", b'"\xff"', "not JSON"),
        ("json", b"9" * 5000, r"not JSON.*4300"),
        ("txt", b"caf\xe9", r"UTF-8.*4 bytes.*position 3"),
        ("cls", b"9" * 5000, r"whole number, not b'9{64}' \(5000 bytes\)"),
        ("cls", b"1" + b" " * 70 + b"x", "whole number"),
        ("cls", b"\xd9\xa3", "whole number"),
    ],
)
def test_what_is_no_picture_fails_in_words_too(extension: str, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Decoder(DecodeArgs()).begin({"x": Encoded(memoryview(data), extension)})
