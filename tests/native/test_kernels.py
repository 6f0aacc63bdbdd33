"""The C module does what torch does, to the last bit, and resizes as Pillow does; without it an error says what to do."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kernel_twins
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import loaderkit
from loaderkit import Pipeline, native
from loaderkit.connectors.file import FileConnector
from loaderkit.native.pixels import Pixels, packed
from loaderkit.stages.image.resize import _with_pillow

compiled: Any = native._kernels
SCALE, SHIFT = (0.0171, 0.0175, 0.0174), (-2.118, -2.036, -1.804)


def view(seed: int, height: int, width: int, margin: int) -> Pixels:
    """A crop of a larger picture, so that rows do not follow one another; with `margin` 0 they do."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 256, (height + 2 * margin, width + 2 * margin, 3), dtype=np.uint8)
    return whole[margin : margin + height, margin : margin + width]


def either_way(pixels: Pixels, mirrored: bool) -> Pixels:
    return pixels[:, ::-1] if mirrored else pixels


pictures = st.builds(view, st.integers(0, 99), st.integers(1, 40), st.integers(1, 700), st.integers(0, 3))


def test_the_stub_names_what_there_is() -> None:
    path = Path(native.__file__).with_name("_kernels.pyi")
    named = {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert named == {name for name in dir(compiled) if not name.startswith("_")}


class TestSameAsTwin:
    @given(st.lists(st.binary(max_size=20), max_size=9))
    def test_cut(self, parts: list[bytes]) -> None:
        buffer, lengths = memoryview(b"".join(parts)), list(map(len, parts))
        assert native.cut(buffer, lengths) == parts

    @given(st.lists(st.binary(max_size=9), min_size=1, max_size=9), st.data())
    def test_texts(self, parts: list[bytes], data: st.DataObject) -> None:
        ends = np.cumsum(list(map(len, parts)), dtype=np.int64)
        places = np.array(data.draw(st.lists(st.integers(0, len(parts) - 1))), np.int64)
        assert native.texts(b"".join(parts), ends, places) == kernel_twins.texts(b"".join(parts), ends, places)

    @given(st.binary(max_size=300), st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 50))
    def test_ranges(self, content: bytes, starts: list[int], length: int) -> None:
        with TemporaryDirectory() as folder:
            path = f"{folder}/data"
            Path(path).write_bytes(content)
            results = []
            for door in (native, kernel_twins):
                buffer = memoryview(bytearray(length * len(starts)))
                status = door.gather_ranges(path, np.array(starts, np.int64), length, buffer)
                one = memoryview(bytearray(length))
                results.append((status, bytes(buffer), door.read_range(path, 7, one, False), bytes(one)))
            assert results[0][0] == results[1][0]
            assert results[0][2:] == results[1][2:]
            num_read = results[0][0][0]
            assert results[0][1][: num_read // length * length] == results[1][1][: num_read // length * length]


class TestSameAsTorch:
    @given(pictures, st.integers(0, 2), st.booleans())
    def test_write_planes(self, pixels: Pixels, slot: int, mirrored: bool) -> None:
        pixels = either_way(pixels, mirrored)
        slots = np.full((3, 3, *pixels.shape[:2]), 9, np.uint8)
        native.write_planes(slots, slot, pixels)
        for number in range(3):
            wanted = pixels.transpose(2, 0, 1) if number == slot else np.full_like(slots[number], 9)
            assert np.array_equal(slots[number], wanted)

    @given(pictures, st.lists(st.booleans(), min_size=1, max_size=4), st.booleans())
    def test_write_normalized(self, pixels: Pixels, present: list[bool], mirrored: bool) -> None:
        pixels = either_way(pixels, mirrored)
        shape = (len(present) + 2, 3, *pixels.shape[:2])
        found, wanted = torch.full(shape, 5.0), torch.full(shape, 5.0)
        images = [pixels if here else None for here in present]
        native.write_normalized(found.numpy(), 1, images, SCALE, SHIFT)
        column = (torch.tensor(SCALE).reshape(3, 1, 1), torch.tensor(SHIFT).reshape(3, 1, 1))
        for slot, here in enumerate(present, 1):
            if here:
                wanted[slot] = torch.from_numpy(pixels.transpose(2, 0, 1).copy()) * column[0] + column[1]
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))

    @given(
        st.sampled_from([1, 3, 4]),
        st.sampled_from([(0, 1, 2), (1, 0, 2), (2, 1, 0)]),
        st.booleans(),
        st.integers(0, 99),
    )
    def test_other_layouts(self, channels: int, axes: tuple[int, int, int], mirrored: bool, seed: int) -> None:
        """Grey, RGBA, and pixels whose channels, columns or rows do not lie side by side."""
        shape = [5, 7]
        shape.insert(axes.index(2), channels)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8).transpose(np.argsort(axes).tolist())
        pixels = np.moveaxis(pixels, pixels.shape.index(channels), 2) if pixels.shape[2] != channels else pixels
        pixels = either_way(pixels, mirrored)
        planes = pixels.transpose(2, 0, 1)
        slots = np.full((2, *planes.shape), 9, np.uint8)
        native.write_planes(slots, 1, pixels)
        assert np.array_equal(slots[1], planes)
        assert (slots[0] == 9).all()
        scale, shift = SCALE[:1] * channels, SHIFT[:1] * channels
        floats = np.zeros((3, *planes.shape), np.float32)
        native.write_normalized(floats, 1, [pixels, None], scale, shift)
        assert np.array_equal(floats[1], planes * np.float32(scale[0]) + np.float32(shift[0]))
        assert not floats[2].any()

    @pytest.mark.parametrize("size", [(1, 1), (4, 1), (5, 4)])
    def test_pixels_of_another_size_are_not_spread_over_the_slot(self, size: tuple[int, int]) -> None:
        slots = np.full((2, 3, 4, 4), 5.0, np.float32)
        with pytest.raises(ValueError, match="pixels' size"):
            native.write_normalized(slots, 0, [np.full((*size, 3), 9, np.uint8)], SCALE, SHIFT)
        assert (slots == 5).all()

    @given(pictures)
    def test_packed(self, pixels: Pixels) -> None:
        again = packed(pixels[:, ::-1])
        assert np.array_equal(again, pixels[:, ::-1])
        assert again.strides[1:] == (3, 1)
        assert packed(pixels) is pixels, "no copy without need"

    @pytest.mark.parametrize(
        "call",
        [
            lambda c: c.write_planes(np.zeros((1, 3, 4, 4), np.uint8), 1, np.zeros((4, 4, 3), np.uint8)),
            lambda c: c.write_planes(np.zeros((1, 3, 4, 4), np.float32), 0, np.zeros((4, 4, 3), np.uint8)),
            lambda c: c.write_planes(np.zeros((1, 3, 5, 4), np.uint8), 0, np.zeros((4, 4, 3), np.uint8)),
            lambda c: c.write_planes(
                np.zeros((1, 3, 4, 4), np.uint8), 0, np.zeros((4, 3, 4), np.uint8).transpose(0, 2, 1)
            ),
            lambda c: c.write_normalized(np.zeros((1, 3, 4, 4), np.float32), -1, [view(0, 4, 4, 0)], SCALE, SHIFT),
            lambda c: c.write_normalized(np.zeros((2, 3, 4, 4), np.float32), 1, [view(0, 4, 4, 0)] * 2, SCALE, SHIFT),
            lambda c: c.write_normalized(np.zeros((2, 3, 4, 4)), 0, [view(0, 4, 4, 0)], SCALE, SHIFT),
            lambda c: c.resample([(np.zeros((4, 4, 4), np.uint8), view(0, 4, 4, 0), None, True)]),
            lambda c: c.resample([(np.zeros((0, 4, 3), np.uint8), view(0, 4, 4, 0), None, True)]),
            lambda c: c.resample([(np.zeros((4, 4, 3), np.uint8), view(0, 4, 4, 0)[:, ::-1], None, True)]),
            lambda c: c.resample([(np.zeros((4, 4, 3), np.uint8), view(0, 4, 4, 0), (0.5, 0.0, 4.0, 4.0), True)]),
            lambda c: c.resample([(np.zeros((4, 4, 3), np.uint8), view(0, 4, 4, 0), (0.0, 0.0, math.nan, 4.0), True)]),
            lambda c: c.cut(b"abc", [1, 3]),
            lambda c: c.cut(b"abc", [-1]),
            lambda c: c.read_many(str, ["a"], [0], [3], [None], [2], bytearray(4)),
            lambda c: c.read_many(str, ["a"], [-1], [4], [None], [0], bytearray(4)),
            lambda c: c.read_many(str, ["a"], [0, 1], [4], [None], [0], bytearray(4)),
        ],
    )
    def test_what_does_not_fit_is_refused(self, call: Any) -> None:
        with pytest.raises(ValueError, match=r"must be|must have|must lie|differ"):
            call(compiled)

    @given(pictures, st.integers(1, 300), st.integers(1, 300))
    def test_resize_is_pillows_within_one_level(self, pixels: Pixels, height: int, width: int) -> None:
        target = np.zeros((height, width, 3), np.uint8)
        if not native.CAN_RESAMPLE:
            pytest.skip("this CPU has no AVX2")
        native.resample([(target, pixels, None, True)])
        wanted = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
        assert np.abs(target.astype(int) - wanted).max() <= 1

    @given(
        pictures,
        st.integers(1, 99),
        st.integers(1, 99),
        st.tuples(*[st.floats(0, 0.45)] * 2),
        st.tuples(*[st.floats(0.05, 0.5)] * 2),
    )
    def test_resize_of_a_part_is_pillows_within_one_level(
        self, pixels: Pixels, height: int, width: int, start: Any, extent: Any
    ) -> None:
        if not native.CAN_RESAMPLE:
            pytest.skip("this CPU has no AVX2")
        rows, columns = pixels.shape[:2]
        part = (start[0] * rows, start[1] * columns, extent[0] * rows, extent[1] * columns)
        target = np.zeros((height, width, 3), np.uint8)
        native.resample([(target, pixels, part, True)])
        wanted = _with_pillow(pixels, part, (height, width))
        assert np.abs(target.astype(int) - wanted).max() <= 1

    @given(st.integers(0, 255), st.integers(1, 50), st.integers(1, 50), st.integers(1, 90), st.integers(1, 90))
    def test_a_plain_picture_stays_plain(
        self, level: int, height: int, width: int, to_height: int, to_width: int
    ) -> None:
        target = np.zeros((to_height, to_width, 3), np.uint8)
        pixels = np.full((height, width, 3), level, np.uint8)
        if native.CAN_RESAMPLE:
            native.resample([(target, pixels, None, True)])
            assert (target == level).all()


class TestReading:
    def test_read_range(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        path.write_bytes(bytes(range(256)) * 40)
        buffer = bytearray(300)
        num_read, _, size, mtime_ns = compiled.read_range(str(path), 9000, memoryview(buffer), False)
        assert (num_read, size, mtime_ns) == (300, 10240, path.stat().st_mtime_ns)
        assert bytes(buffer) == path.read_bytes()[9000:9300]
        assert compiled.read_range(os.fsencode(path), 10200, memoryview(buffer), False)[0] == 40
        with pytest.raises(FileNotFoundError):
            compiled.read_range(str(tmp_path / "nothing"), 0, memoryview(buffer), False)
        with pytest.raises(ValueError, match="null"):
            compiled.read_range("a\0b", 0, memoryview(buffer), False)
        with pytest.raises((TypeError, BufferError)):
            compiled.read_range(str(path), 0, b"may not be written", False)

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(b"0123456789")
        connector = FileConnector(tmp_path)
        buffer = bytearray(4)
        connector.read_into("data", 3, memoryview(buffer), etag=connector.stat("data").etag)
        assert buffer == b"3456"
        for key, error in (("none", "ObjectNotFoundError"), ("data", "ShortReadError"), (".", "ObjectNotFoundError")):
            with pytest.raises(loaderkit.errors.ConnectorError) as caught:
                connector.read_into(key, 8, memoryview(buffer))
            assert type(caught.value).__name__ == error


def test_the_same_batches_without_avx2_but_for_rounding(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, crops and flips are the same; resized pixels within a level."""
    pipeline = Pipeline.files(photos, label="parent").shuffle(seed=1).read().decode()
    pipeline = pipeline.random_resized_crop(40).random_horizontal_flip().batch(16)
    with loaderkit.build(pipeline) as loader:
        quick = list(loader)
    monkeypatch.setattr(native, "CAN_RESAMPLE", False)
    with loaderkit.build(pipeline) as loader:
        plain = list(loader)
    for one, other in zip(plain, quick, strict=True):
        assert one["__key__"] == other["__key__"]
        assert (one["image"].int() - other["image"].int()).abs().max() <= 2


@pytest.mark.fresh_interpreters
def test_without_the_module_the_first_use_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("source: {kind: files, url: .}\nstages: [read, {batch: {size: 1}}]\n")
    program = """
import sys
sys.modules["loaderkit.native._kernels"] = None
import loaderkit
for use in (lambda: loaderkit.build("p.yaml"), lambda: loaderkit.restore("x.safetensors")):
    try:
        use()
    except ImportError as error:
        print(error)
from loaderkit.cli import main
sys.exit(main(["check", "p.yaml"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert (done.returncode, len(said)) == (1, 3), done.stderr
    for line in said:
        assert f"loaderkit in {Path(native.__file__).parents[1]}" in line
        assert "install a wheel" in line
        assert "C compiler" in line
