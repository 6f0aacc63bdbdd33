"""Of a JPEG that is cropped next, only a piece is decoded: the same pixels, and the same complaints, as of the whole."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from numpy.typing import NDArray
from PIL import Image as Pillow

import loaderkit
from loaderkit import native
from loaderkit.cli import main
from loaderkit.errors import StageError
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.values import Encoded
from loaderkit.stages.image import decode as decoding
from loaderkit.stages.image.ops import Crop, DecodeNeed

pytestmark = pytest.mark.matrix(6)

jpeg: Any = native._jpeg
needs_libjpeg = pytest.mark.skipif(jpeg is None, reason="built without libjpeg-turbo")
Box = tuple[int, int, int, int]
SAMPLINGS = ["444", "422", "420", "440", "grey", "progressive", "restarts"]


def photograph(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Smooth colours with noise on them: chroma that differs from pixel to pixel shows if it is upsampled another way."""
    rng = np.random.default_rng(seed)
    coarse = Pillow.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Pillow.Resampling.BICUBIC)).astype(float)
    noisy: NDArray[np.uint8] = (smooth + rng.normal(0, 25, smooth.shape)).clip(0, 255).astype(np.uint8)
    return noisy


def encoded(pixels: NDArray[np.uint8], sampling: str, quality: int = 90) -> bytes:
    if sampling == "grey":
        found: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[:, :, :1]), quality, "GRAY", "Gray")
    elif sampling in ("progressive", "restarts"):
        buffer = io.BytesIO()
        options = {"progressive": True} if sampling == "progressive" else {"restart_marker_blocks": 3}
        Pillow.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=2, **options)
        found = buffer.getvalue()
    else:
        found = simplejpeg.encode_jpeg(pixels, quality, "RGB", sampling)
    return found


def is_left(job: list[Any]) -> bool:
    """Whether a piece is left to others, and those beside it are not."""
    plain = (encoded(photograph(20, 30, 1), "420"), 1, (3, 4, 5, 6), np.empty(5 * (6 + jpeg.BESIDE) * 3, np.uint8))
    (before, here, behind) = jpeg.decode([plain, tuple(job), plain])
    assert before[1]
    assert behind[1]
    return not here[1]


def piece(data: bytes, step: int, box: Box) -> NDArray[np.uint8] | None:
    """The pixels of a box, cut out of the rows that were decoded for it."""
    _, left, height, width = box
    buffer = np.full(height * (width + jpeg.BESIDE) * 3, 77, np.uint8)
    ((first, num_columns, took_s),) = jpeg.decode([(data, step, box, buffer)])
    assert took_s >= 0
    if not num_columns:
        return None
    assert first <= left
    assert left + width <= first + num_columns
    rows: NDArray[np.uint8] = buffer[: height * num_columns * 3].reshape(height, num_columns, 3)
    return rows[:, left - first : left - first + width]


@st.composite
def boxes(draw: st.DrawFn, height: int, width: int) -> Box:
    num_rows, num_columns = draw(st.integers(1, height)), draw(st.integers(1, width))
    return draw(st.integers(0, height - num_rows)), draw(st.integers(0, width - num_columns)), num_rows, num_columns


@needs_libjpeg
class TestPieces:
    @settings(deadline=None, max_examples=num_examples(300))
    @given(st.data(), st.sampled_from(SAMPLINGS), st.integers(1, 130), st.integers(1, 130), st.integers(0, 9))
    def test_are_the_pixels_that_pillow_decodes(
        self, data: st.DataObject, sampling: str, height: int, width: int, seed: int
    ) -> None:
        if sampling in ("progressive", "restarts"):
            height, width = height + 40, width + 40  # Pillow's encoder has too small a buffer for less
        file = encoded(photograph(height, width, seed), sampling)
        top, left, num_rows, num_columns = box = data.draw(boxes(height, width))
        with Pillow.open(io.BytesIO(file)) as image:
            whole = np.asarray(image.convert("RGB"))
        assert np.array_equal(piece(file, 1, box), whole[top : top + num_rows, left : left + num_columns])  # type: ignore[arg-type]

    @settings(deadline=None, max_examples=num_examples(200))
    @given(
        st.data(), st.sampled_from(SAMPLINGS), st.sampled_from([2, 4, 8]), st.integers(40, 130), st.integers(40, 130)
    )
    def test_are_those_of_the_whole_decoded_smaller(
        self, data: st.DataObject, sampling: str, step: int, height: int, width: int
    ) -> None:
        file = encoded(photograph(height, width, step), sampling)
        there = -(-height // step), -(-width // step)
        top, left, num_rows, num_columns = box = data.draw(boxes(*there))
        whole = simplejpeg.decode_jpeg(file, "RGB", min_height=there[0], min_width=there[1], min_factor=step)
        assert whole.shape[:2] == there
        assert np.array_equal(piece(file, step, box), whole[top : top + num_rows, left : left + num_columns])  # type: ignore[arg-type]

    @settings(deadline=None, max_examples=num_examples(400))
    @given(st.data(), st.sampled_from(SAMPLINGS), st.integers(0, 3))
    def test_a_file_the_strict_decoder_refuses_is_refused_wherever_the_piece_lies(
        self, data: st.DataObject, sampling: str, seed: int
    ) -> None:
        height, width = 72, 88
        file = bytearray(encoded(photograph(height, width, seed), sampling))
        if data.draw(st.booleans(), label="cut"):
            del file[data.draw(st.integers(2, len(file) - 1)) :]
            if data.draw(st.booleans(), label="closed again"):
                file += b"\xff\xd9"
        else:
            for _ in range(data.draw(st.integers(1, 4))):
                file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
        box = data.draw(boxes(height, width))
        try:
            found = simplejpeg.decode_jpeg(bytes(file), "RGB")
        except ValueError:
            assert piece(bytes(file), 1, box) is None
            return
        top, left, num_rows, num_columns = box
        here = piece(bytes(file), 1, box) if found.shape[:2] == (height, width) else None
        assert here is None or np.array_equal(here, found[top : top + num_rows, left : left + num_columns])

    @pytest.mark.parametrize(
        "box", [(0, 0, 0, 5), (0, 0, 5, 0), (70, 0, 3, 5), (0, 80, 5, 9), (4_000_000_000, 0, 300_000_000, 1)]
    )
    def test_a_box_that_is_not_inside_is_left_to_others(self, box: Box) -> None:
        file = encoded(photograph(72, 88, 0), "420")
        assert is_left([file, 1, box, np.empty(100_000, np.uint8)])

    def test_too_little_memory_is_not_written_past(self) -> None:
        file = encoded(photograph(72, 88, 0), "420")
        memory = np.full(72 * 88 * 3, 77, np.uint8)
        assert is_left([file, 1, (0, 0, 72, 88), memory[:-1]])
        assert (memory == 77).all()

    @pytest.mark.parametrize(
        "job",
        [
            5,
            (b"", 1, (0, 0, 1, 1)),
            (b"", 1, (0, 0, 1), bytearray(9)),
            (b"", 1, (0, 0, 1, 1), b"cannot be written to"),
            ("text", 1, (0, 0, 1, 1), bytearray(9)),
        ],
    )
    def test_a_wrong_job_is_refused_and_nothing_is_written(self, job: Any) -> None:
        memory = bytearray(b"M" * (20 * (30 + jpeg.BESIDE) * 3))
        plain = (encoded(photograph(20, 30, 1), "420"), 1, (0, 0, 20, 30), memory)
        with pytest.raises((TypeError, BufferError, ValueError)):
            jpeg.decode([plain, job])
        assert set(memory) == {ord("M")}
        memory.clear()  # BufferError if anybody still holds on to it

    def test_no_jobs(self) -> None:
        assert jpeg.decode([]) == []

    @pytest.mark.parametrize("sampling", ["411", "CMYK", "png", "nothing"])
    def test_what_is_not_usual_is_left_to_others(self, sampling: str) -> None:
        pixels = photograph(64, 64, 0)
        buffer = io.BytesIO()
        if sampling == "411":
            buffer.write(encoded(pixels, sampling))
        elif sampling != "nothing":
            image = Pillow.fromarray(pixels)
            (image.convert("CMYK") if sampling == "CMYK" else image).save(
                buffer, "png" if sampling == "png" else "JPEG"
            )
        assert is_left([buffer.getvalue(), 1, (0, 0, 9, 9), np.empty(10_000, np.uint8)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of all kinds, two of them cut below their middle and closed again."""
    found = tmp_path_factory.mktemp("pieces")
    kinds = [*SAMPLINGS, "411"]
    for number in range(24):
        height, width = 60 + 7 * number, 180 - 5 * number
        pixels = photograph(height, width, number)
        data = encoded(pixels, kinds[number % len(kinds)])
        if number in (5, 14):
            data = data[: len(data) * 3 // 4] + b"\xff\xd9"
        (found / f"{number:02}.jpg").write_bytes(data)
    return found


def run(folder: Path, stages: list[Any], *, decoded: Any = "decode", **more: Any) -> list[dict[str, Any]]:
    described = {
        "source": {"kind": "files", "url": str(folder), "include": "*.jpg"},
        "order": {"epochs": 2},
        "errors": {"on_bad_sample": "replace"},
        "stages": ["read", decoded, *stages, {"batch": {"size": 8}}],
        **more,
    }
    with loaderkit.build(described) as loader:
        return [
            {name: (v.numpy() if name != "__key__" else v) for name, v in batch.items()}
            for _ in range(2)
            for batch in loader
        ]


def png(levels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(levels).save(buffer, "PNG")
    return buffer.getvalue()


def tar_of(folder: Path, members: dict[str, bytes], fields: dict[str, str]) -> dict[str, Any]:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return {"kind": "tar", "url": str(folder), "fields": fields}


CROP: dict[str, Any] = {"random_resized_crop": {"size": [40, 48]}}
PIECES: dict[str, list[Any]] = {
    "random_resized_crop": [CROP],
    "random_crop": [{"random_crop": {"size": [50, 33]}}],
    "bicubic": [{"random_resized_crop": {"size": 30, "interpolation": "bicubic"}}],
    "nearest, then others": [
        {"random_resized_crop": {"size": 30, "interpolation": "nearest"}},
        "random_horizontal_flip",
        "color_jitter",
    ],
    "a crop of a crop": [CROP, {"random_crop": {"size": 20}}],
    "seen then": [CROP, {"call": {"function": "tests.stages.image.test_pieces:unchanged"}}],
}
WHOLES: dict[str, list[Any]] = {
    "flipped first": ["random_horizontal_flip", CROP],
    "colours first": ["color_jitter", CROP],
    "seen first": [{"call": {"function": "tests.stages.image.test_pieces:unchanged"}}, CROP],
    "padded": [{"random_crop": {"size": 90, "pad_if_needed": True}}],
    "not cropped": [{"resize": {"size": [40, 40]}}],
    "maybe padded": [{"center_crop": {"size": 40}}],
}


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class Bytes:
    """Items that hold encoded pictures."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._paths[index].read_bytes()}


class Counted:
    """The C module, and how many pieces it gave."""

    def __init__(self) -> None:
        self.num_pieces = 0

    def decode(self, jobs: list[Any]) -> Any:
        found = jpeg.decode(jobs)
        self.num_pieces += sum(num_columns > 0 for _, num_columns, _ in found)
        return found


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    return [batch["__key__"] for batch in first] == [batch["__key__"] for batch in second] and all(
        np.array_equal(one[name], other[name])
        for one, other in zip(first, second, strict=True)
        for name in one
        if name != "__key__"
    )


@needs_libjpeg
class TestInAPipeline:
    @pytest.mark.parametrize("name", [*PIECES, *WHOLES])
    @pytest.mark.parametrize("executor", ["inline", "thread"])
    def test_batches_are_the_same_to_the_last_byte(
        self, folder: Path, name: str, executor: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        stages = [*(PIECES | WHOLES)[name], {"center_crop": {"size": 20}}]
        here = run(folder, stages, prefetch={"executor": executor})
        assert (counted.num_pieces > 0) == (name in PIECES)
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(folder, stages, prefetch={"executor": executor}))

    def test_a_mask_is_cut_at_the_same_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mask is the picture's own levels, so they must fit one another after the cut."""
        members = {}
        for number in range(8):
            grey = photograph(90 + number, 120, number)[:, :, :1]
            members[f"{number}.jpg"] = simplejpeg.encode_jpeg(np.ascontiguousarray(grey), 100, "GRAY", "Gray")
            members[f"{number}.png"] = png(grey[:, :, 0])
        source = tar_of(tmp_path, members, {"image": "jpg", "mask": "png"})
        decoded = {"decode": {"masks": ["mask"]}}
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        crop: list[Any] = [{"random_resized_crop": {"size": 40, "interpolation": "nearest"}}]
        here = run(tmp_path, crop, decoded=decoded, source=source)
        assert counted.num_pieces > 0
        for batch in here:
            assert np.abs(batch["image"][:, :1].astype(int) - batch["mask"]).max() <= 3
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(tmp_path, crop, decoded=decoded, source=source))

    def test_what_is_not_cropped_stays_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        members = {}
        for number in range(8):
            members[f"{number}.a.jpg"] = members[f"{number}.b.jpg"] = encoded(photograph(64, 64, number), "420")
        source = tar_of(tmp_path, members, {"one": "a.jpg", "other": "b.jpg"})
        crop: list[Any] = [{"random_resized_crop": {"size": 24, "fields": ["one"]}}]
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        here = run(tmp_path, crop, source=source)
        assert counted.num_pieces == 17, "one of each sample in each epoch, and one to see what a batch looks like"
        assert here[0]["one"].shape == (8, 3, 24, 24)
        assert here[0]["other"].shape == (8, 3, 64, 64)
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(tmp_path, crop, source=source))

    def test_decoded_smaller_the_piece_is_the_same_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for number, sampling in enumerate(["420", "444", "422", "grey"]):
            (tmp_path / f"{number}.jpg").write_bytes(encoded(photograph(700 + number, 801, number), sampling))
        decoded = {"decode": {"scaled": True}}
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        here = run(tmp_path, [CROP], decoded=decoded)
        assert counted.num_pieces > 0
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(tmp_path, [CROP], decoded=decoded))

    def test_upright_pictures_are_whole(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        upright = {"decode": {"exif_orientation": True}}
        assert same(run(folder, [CROP], decoded=upright), run(folder, [CROP]))
        num_plain = counted.num_pieces
        run(folder, [CROP], decoded=upright)
        assert counted.num_pieces == num_plain

    def test_bytes_of_a_data_set(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        counted = Counted()
        monkeypatch.setattr(native, "decode_pieces", counted.decode)
        source = {"kind": "dataset", "object": "tests.stages.image.test_pieces:Bytes", "args": {"folder": str(folder)}}
        decoded = {"decode": {"fields": ["image"]}}
        here = run(folder, [CROP], decoded=decoded, source=source)
        assert counted.num_pieces > 0
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(folder, [CROP], decoded=decoded, source=source))

    def test_another_process_gives_the_same(self, folder: Path) -> None:
        assert same(run(folder, [CROP]), run(folder, [CROP], prefetch={"executor": "process"}))

    def test_a_picture_too_small_for_its_crop_is_refused_by_the_crop(self, folder: Path) -> None:
        with pytest.raises(StageError, match=r"random_crop failed .* smaller than the crop"):
            run(folder, [{"random_crop": {"size": 500}}], errors={"on_bad_sample": "raise"})

    def test_a_picture_cut_below_its_crop_is_bad(self, tmp_path: Path) -> None:
        data = encoded(photograph(200, 200, 0), "420")
        (tmp_path / "cut.jpg").write_bytes(data[: len(data) * 9 // 10] + b"\xff\xd9")
        small = {"random_resized_crop": {"size": 16, "scale": [0.01, 0.01], "ratio": [1, 1]}}
        with pytest.raises(StageError, match=r"cut\.jpg.*truncated JPEG"):
            run(tmp_path, [small], errors={"on_bad_sample": "raise"})

    def test_a_damaged_picture_leaves_those_beside_it_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of two fields the first is whole and decoded; the second's failure is the sample's, and names the field."""
        members = {}
        for number in range(8):
            data = encoded(photograph(90, 90, number), "420")
            members[f"{number}.a.jpg"] = data
            members[f"{number}.b.jpg"] = data[: len(data) // 2] if number == 3 else data
        source = tar_of(tmp_path, members, {"one": "a.jpg", "other": "b.jpg"})
        with pytest.raises(StageError, match=r"sample '3' .* field 'other': truncated JPEG"):
            run(tmp_path, [CROP], source=source, errors={"on_bad_sample": "raise"}, order={"epochs": 1})
        skip = {"on_bad_sample": "skip", "max_bad_samples": 8}
        here = run(tmp_path, [CROP], source=source, errors=skip, order={"epochs": 1})
        assert sorted(key for batch in here for key in batch["__key__"]) == [*"0124567"]
        monkeypatch.setattr(native, "HAS_JPEG", False)
        assert same(here, run(tmp_path, [CROP], source=source, errors=skip, order={"epochs": 1}))

    def test_no_memory_for_one_picture_is_no_end_of_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What cannot be had in part is decoded whole, for which there may be no memory."""
        for number in range(8):
            file = encoded(photograph(90, 90 + number, number), "411" if number == 3 else "420")
            (tmp_path / f"{number}.jpg").write_bytes(file)

        def whole(data: memoryview, size: tuple[int, int], *_: Any) -> Any:
            raise MemoryError(f"{size}")

        monkeypatch.setattr(decoding, "decode_jpeg", whole)
        skip = {"on_bad_sample": "skip", "max_bad_samples": 8}
        (here,) = run(tmp_path, [CROP], errors=skip, order={"epochs": 1})
        assert sorted(here["__key__"]) == [f"{number}.jpg" for number in range(8) if number != 3]
        with pytest.raises(StageError, match=r"sample .3\.jpg. in .*: MemoryError"):
            run(tmp_path, [CROP], errors={"on_bad_sample": "raise"}, order={"epochs": 1})

    @pytest.mark.parametrize("bad", [(), (2,)])
    def test_the_picture_that_took_longest_is_named(
        self, bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seconds = [100.0, 300.0, 200.0]
        is_plain = [place not in bad for place in range(3)]

        def decode(jobs: list[Any]) -> Any:
            pieces = zip(jpeg.decode(jobs), is_plain, seconds, strict=True)
            return [(first, num_columns * plain, took_s) for (first, num_columns, _), plain, took_s in pieces]

        monkeypatch.setattr(native, "decode_pieces", decode)
        decoder = decoding.Decoder(decoding.DecodeArgs(), lambda height, width, _: DecodeNeed(Crop(1, 2, 5, 6)))
        indices = np.arange(3)
        chunk = SampleChunk(BatchWork(epoch=0, step=0, positions=indices, indices=indices), 0, 3, indices)
        files = [memoryview(encoded(photograph(20, 20, number), "420")) for number in range(3)]
        chunk.samples = [{"image": Encoded(file, "jpg")} for file in files]
        left = [(place, piece) for place, sample in enumerate(chunk.samples) for piece in decoder.begin(sample or {})]
        decoder.finish(chunk, left, unexpected)
        assert chunk.slowest == (300.0, 1)
        chunk.slowest = (0.0, 0)
        (one, two, three), place = [piece for _, piece in left], 2
        decoder.finish(chunk, [(0, one), (place, two), (place, three)], unexpected)
        assert chunk.slowest[0] >= 500.0, "of a sample with two pictures both count"
        assert chunk.slowest[1] == place
        shapes = [sample["image"].pixels.shape for sample in chunk.samples if sample is not None]
        assert shapes == [(5, 6, 3) if plain else (20, 20, 3) for plain in is_plain]


def unexpected(chunk: SampleChunk, place: int, error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("there", "stages", "said"),
    [
        (True, ["decode", CROP], "decoded: crop of random_resized_crop"),
        (False, ["decode", CROP], "decoded: whole: for the crop alone loaderkit.native._jpeg is missing"),
        (True, [{"decode": {"exif_orientation": True}}, CROP], None),
        (True, ["decode", {"random_crop": {"size": 20, "padding": 1}}], None),
        (True, [{"decode": {"fields": ["other"]}}, {"random_resized_crop": {"size": 9, "fields": ["image"]}}], None),
    ],
)
def test_explain_says_how_much_is_decoded(
    folder: Path,
    tmp_path: Path,
    there: bool,
    stages: list[Any],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(native, "HAS_JPEG", there)
    described = tmp_path / "p.yaml"
    source = {"kind": "files", "url": str(folder), "include": "*.jpg"}
    described.write_text(
        json.dumps({"version": 1, "source": source, "stages": ["read", *stages, {"batch": {"size": 4}}]})
    )
    assert main(["explain", str(described)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# JPEGs")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
