"""Decoding through DALI where samples are not all alike: sizes that differ, several images, objects, what DALI refuses."""

from __future__ import annotations

import io
import logging
import re
import tarfile
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_photo
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, LoaderkitError, StageError
from loaderkit.samples.chunk import BatchWork, SampleChunk
from loaderkit.samples.values import Encoded, GpuDecoded
from loaderkit.stages.image.dali.graph import Graph
from loaderkit.stages.image.dali.renderer import Renderer
from loaderkit.stages.image.formats import jpeg_size
from loaderkit.stages.image.geometry import ResizeArgs, resize_steps

Chain = Callable[[Pipeline], Pipeline]


def photo(index: int, size: tuple[int, int] = (64, 48)) -> Pillow.Image:
    return Pillow.open(io.BytesIO(make_photo(index))).resize(size)


def encoded(picture: Pillow.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def outcome(pipeline: Pipeline, chain: Chain, device: Any, decode: dict[str, Any], **options: Any) -> Any:
    """The batches of one epoch, or the error that came instead."""
    overrides = {"prefetch.executor": "inline", "order.epochs": 1, **options.pop("overrides", {})}
    try:
        with loaderkit.build(
            chain(pipeline.read().decode(device=device, **decode)), overrides=overrides, **options
        ) as loader:
            return list(loader)
    except LoaderkitError as error:
        return str(error)


def assert_same(pipeline: Pipeline, chain: Chain, decode: dict[str, Any] | None = None, **options: Any) -> Any:
    """Both ways give the same error, or batches of the same samples and shapes, with nearly the same pixels."""
    ours, theirs = (
        outcome(pipeline, chain, device, decode or {}, **{name: dict(v) for name, v in options.items()})
        for device in ("cpu", "dali-cpu")
    )
    if isinstance(ours, str) or isinstance(theirs, str):
        assert theirs == ours
        return ours
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert_close(value, other[name])
    return ours


def assert_close(mine: Any, other: Any) -> None:
    assert type(mine) is type(other)
    if isinstance(mine, torch.Tensor):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert (mine.double() - other.double()).abs().mean() < 0.5
    elif isinstance(mine, list) and isinstance(mine[0], torch.Tensor):
        for one, two in zip(mine, other, strict=True):
            assert_close(one, two)
    else:
        assert mine == other


FILES = {f"{n}.jpg": make_photo(n) for n in range(6)}


class TestSizesThatDiffer:
    def same(self, chain: Chain, policy: str = "raise") -> Any:
        return assert_same(
            Pipeline.files("memory://", include="*.jpg"),
            chain,
            connectors={"memory": MemoryConnector(FILES)},
            overrides={"errors.on_bad_sample": policy},
        )

    @pytest.mark.parametrize("kind", ["list", "pad"])
    def test_ragged_batches(self, kind: Any) -> None:
        self.same(lambda p: p.resize(40).batch(4, ragged={"image": kind}))
        self.same(lambda p: p.batch(4, ragged={"image": kind}))

    def test_they_are_named_as_ever(self) -> None:
        assert "give all samples one shape" in self.same(lambda p: p.resize(40).batch(4))

    def test_they_are_bad_samples(self) -> None:
        files = {name: encoded(photo(n, (64, 48) if n % 2 else (64, 64))) for n, name in enumerate(FILES)}
        found = assert_same(
            Pipeline.files("memory://", include="*.jpg"),
            lambda p: p.resize(40).batch(6),
            connectors={"memory": MemoryConnector(files)},
            overrides={"errors.on_bad_sample": "skip"},
        )
        assert len(found[0]["image"]) == 3

    def test_ragged_images_are_normalised_alike(self) -> None:
        found = self.same(lambda p: p.resize(40).batch(4, ragged={"image": "list"}).normalize())
        assert {image.dtype for batch in found for image in batch["image"]} == {torch.float32}


def with_thumbnail(data: bytes) -> bytes:
    """A JPEG with another one, its end marker and all, in its header."""
    payload = b"Exif\0\0" + encoded(photo(2, (16, 16)))
    return data[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + data[2:]


def ycck() -> bytes:
    """Four channels as brightness, colour and black: what printers' programs write."""
    data = bytearray(encoded(photo(3).convert("CMYK")))
    data[data.index(b"Adobe") + 11] = 2
    return bytes(data)


class TestOddJpegs:
    def make(self, **options: Any) -> bytes:
        buffer = io.BytesIO()
        photo(4, (150, 110)).save(buffer, "JPEG", **options)
        return buffer.getvalue()

    def test_pixels_are_those_of_our_own_decoder(self) -> None:
        orientation = Pillow.Exif()
        orientation[0x0112] = 6
        plain = self.make()
        files = {
            "progressive": self.make(progressive=True),
            "restarts": self.make(restart_marker_rows=1),
            "no subsampling": self.make(subsampling=0),
            "rgb": self.make(keep_rgb=True),
            "orientation": self.make(exif=orientation),
            "thumbnail": with_thumbnail(plain),
            "comment": self.make(comment=b"\xff\xd9\xff\xda"),
            "a little behind": plain + b"\7" * 100,
            "much behind": plain + b"\7" * 10_000,
            "another behind": plain + plain,
            "fill bytes": plain[:2] + b"\xff\xff" + plain[2:],
            "cmyk": encoded(photo(3).convert("CMYK")),
            "ycck": ycck(),
            "one pixel": encoded(Pillow.new("L", (1, 1), 77)),
            "one row": encoded(Pillow.new("RGB", (900, 1), (9, 99, 30))),
        }
        found = assert_same(
            Pipeline.files("memory://", include="*.jpg"),
            lambda p: p.random_resized_crop(24).random_horizontal_flip().batch(1),
            connectors={"memory": MemoryConnector({f"{name}.jpg": data for name, data in files.items()})},
        )
        assert len(found) == len(files)

    @pytest.mark.parametrize("end", [b"", b"\xff", bytes(99)], ids=["none", "half", "zeros"])
    def test_without_an_end_marker_they_are_truncated(self, end: bytes) -> None:
        message = assert_same(
            Pipeline.files("memory://", include="*.jpg"),
            lambda p: p.random_resized_crop(24).batch(1),
            connectors={"memory": MemoryConnector({"a.jpg": self.make()[:-2] + end})},
        )
        assert "truncated JPEG" in message

    def test_four_channels_are_known(self) -> None:
        assert jpeg_size(memoryview(ycck())) is None
        assert jpeg_size(memoryview(self.make())) == (110, 150)

    def test_the_end_of_a_thumbnail_is_not_that_of_the_image(self) -> None:
        data = with_thumbnail(self.make())
        message = assert_same(
            Pipeline.files("memory://", include="*.jpg"),
            lambda p: p.resize([8, 8]).batch(1),
            connectors={"memory": MemoryConnector({"a.jpg": data[: len(data) * 3 // 4]})},
        )
        assert "truncated" in message


class TestSeveralImages:
    """A crop of one place needs images of one size, with every decoder."""

    @pytest.mark.parametrize("second", ["JPEG", "PNG"])
    @pytest.mark.parametrize("size", [(64, 48), (32, 24)])
    @pytest.mark.parametrize(
        "chain",
        [
            lambda p: p.random_crop(20).batch(4),
            lambda p: p.random_resized_crop(20).random_horizontal_flip().batch(4).normalize(),
            lambda p: p.resize([32, 32]).random_crop(20).batch(4),
        ],
    )
    def test_they_share_a_crop(self, tmp_path: Path, second: str, size: tuple[int, int], chain: Chain) -> None:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for index in range(4):
                for name, data in (("jpg", encoded(photo(index))), ("depth.jpg", encoded(photo(index, size), second))):
                    member = tarfile.TarInfo(f"{index}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        assert_same(Pipeline.tar(tmp_path, fields={"image": "jpg", "depth": "depth.jpg"}), chain)


class Objects:
    """Pictures as a data set's own objects."""

    def __init__(self, make: Callable[[Pillow.Image], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._make(photo(index)), "label": index}


class TestObjects:
    @pytest.mark.parametrize("named", [{}, {"fields": ["image"]}])
    @pytest.mark.parametrize(
        "make",
        [lambda p: p, np.array, lambda p: torch.from_numpy(np.array(p)).permute(2, 0, 1).contiguous(), encoded],
        ids=["pillow", "numpy", "torch", "bytes"],
    )
    def test_they_go_through_the_stages(self, make: Callable[[Pillow.Image], Any], named: dict[str, Any]) -> None:
        assert_same(Pipeline.dataset(Objects(make)), lambda p: p.resize([20, 30]).batch(4), named)


class TestMemory:
    def test_what_our_decoder_does_is_done_one_by_one(self) -> None:
        """A batch is one chunk here, and its decoded images are large."""
        data = encoded(photo(1, (2000, 1000))) + bytes(8192)  # what follows the end makes it ours
        files = {f"{n:02}.jpg": data for n in range(16)}
        pipeline = Pipeline.files("memory://", include="*.jpg").read().decode(device="dali-cpu")
        with loaderkit.build(
            pipeline.resize([16, 16]).batch(16),
            connectors={"memory": MemoryConnector(files)},
            overrides={"prefetch.executor": "inline", "prefetch.batches": 1, "order.epochs": 1},
        ) as loader:
            tracemalloc.start()
            try:
                (batch,) = loader
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert len(batch["image"]) == 16
        assert peak_bytes < 4 * 2000 * 1000 * 3


class TestRefusedByDali:
    def test_it_costs_no_other_sample_of_its_batch(self, caplog: pytest.LogCaptureFixture) -> None:
        """What is whole for us and not for DALI: here because `decode` looks at nothing."""
        datas = [make_photo(n) for n in range(8)]
        datas[5] = datas[5][:201] + b"\xfa" + datas[5][202:]  # DALI finds this table wrong
        chunk = SampleChunk(
            BatchWork(epoch=0, step=0, positions=np.arange(8), indices=np.arange(8)), 0, 8, np.arange(8)
        )
        chunk.samples = [{"image": Encoded(memoryview(data), "jpg")} for data in datas]
        renderer = Renderer(
            Graph((("resize", resize_steps(ResizeArgs(size=(16, 16)))),), None, 8, None),
            fields=None,
            max_pixels=10**6,
            draws=lambda name, chunk: np.zeros((len(chunk), 0)),
            decode=lambda chunk: None,
            plain=lambda chunk: None,
            finish=lambda images: images,
        )
        with caplog.at_level(logging.WARNING, "loaderkit"):
            renderer(chunk)
        renderer.close()
        kinds = [type(sample["image"]) for sample in chunk.samples if sample is not None]
        assert kinds == [GpuDecoded] * 5 + [Encoded] + [GpuDecoded] * 2
        (record,) = caplog.records
        assert "decoded on the CPU instead" in record.getMessage()


class Refusing:
    """A DALI pipeline that fails with the same words whatever it is given, and says when it is let go."""

    def __init__(self, words: str, ended: list[str]) -> None:
        self._words = words
        weakref.finalize(self, ended.append, words)

    def feed_input(self, name: str, values: Any) -> None: ...

    def run(self) -> Any:
        where = 'operator `decoders.image`, which was used with the following traceback:\n\n  File "/CUDA/out of memory/x.py"'
        raise RuntimeError(f"Critical error in pipeline:\nError in MIXED {where}\n\nencountered:\n\n{self._words}")


class TestNoImagesFault:
    def render(self, words: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        looked_at: list[int] = []
        ended: list[str] = []

        def decode(chunk: SampleChunk) -> None:
            looked_at.append(chunk.lo)

        monkeypatch.setattr(
            "loaderkit.stages.image.dali.renderer.build_pipeline", lambda dali, graph: Refusing(words, ended)
        )
        chunk = SampleChunk(
            BatchWork(epoch=0, step=0, positions=np.arange(4), indices=np.arange(4)), 0, 4, np.arange(4)
        )
        chunk.samples = [{"image": Encoded(memoryview(make_photo(n)), "jpg")} for n in range(4)]
        renderer = Renderer(
            Graph((("resize", resize_steps(ResizeArgs(size=(16, 16)))),), None, 4, 1),
            name="pictures",
            fields=None,
            max_pixels=10**6,
            draws=lambda name, chunk: np.zeros((len(chunk), 0)),
            decode=decode,
            plain=lambda chunk: None,
            finish=lambda images: images,
        )
        try:
            renderer(chunk)
        except StageError:
            assert len(ended) == 1, "the pipeline goes, with its memory"
            assert looked_at == []
            raise
        return looked_at

    @pytest.mark.parametrize(
        "words",
        [
            "CUDA allocation failed\nRequested size: 100 bytes",
            "std::bad_alloc",
            "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory",
            "nvImageCodec failure: '#5'",
        ],
    )
    def test_memory_that_is_short(self, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StageError, match=r"GPU 1 has no memory for .* a batch of 4 .*stages\.batch\.size smaller"):
            self.render(words, monkeypatch)

    def test_a_gpu_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            StageError, match=r"independent of the images: CUDA runtime API error cudaErrorIllegalAddress"
        ):
            self.render("CUDA runtime API error cudaErrorIllegalAddress (700)", monkeypatch)

    def test_any_other_may_be_an_images(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked_at = self.render("nvImageCodec failure: '#4'", monkeypatch)
        assert set(looked_at) == {0, 1, 2, 3}


class TestConfig:
    def refused(self, *stages: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            loaderkit.build(
                {
                    "source": {"kind": "files", "url": "memory://", "include": "*.jpg"},
                    "stages": ["read", {"decode": {"device": "dali-cpu"}}, *stages],
                },
                connectors={"memory": MemoryConnector({"a.jpg": make_photo(1)})},
            )
        return str(caught.value)

    def test_cubic_without_antialias_is_another_filter_there(self) -> None:
        message = self.refused(
            {"resize": {"size": 8, "interpolation": "bicubic", "antialias": False}}, {"batch": {"size": 4}}
        )
        assert "antialias" in message
        assert "decode: {device: cpu}" in message

    def test_workers_of_a_stage_inside_the_graph(self) -> None:
        assert "`decode`" in self.refused({"resize": {"size": [8, 8], "workers": 2}}, {"batch": {"size": 4}})

    def test_fields_say_what_to_write(self) -> None:
        message = self.refused({"resize": {"size": 8, "fields": ["image"]}}, {"batch": {"size": 4}})
        assert re.search(r"name .*'image'.* in `decode`", message)

    def test_factors_for_other_channels(self) -> None:
        message = self.refused(
            {"resize": {"size": [8, 8]}}, {"batch": {"size": 1}}, {"normalize": {"mean": [0.5] * 4, "std": [0.5]}}
        )
        assert "normalize" in message
        assert "4 numbers" in message


def test_an_unnormalisable_batch_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("0.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"1"))
    pipeline = Pipeline.tar(tmp_path).read().decode(device="dali-cpu").batch(1).normalize()
    with pytest.raises(StageError, match="no image field"), loaderkit.build(pipeline) as loader:
        next(iter(loader))
