"""Files of several folders that are one sample, as for segmentation: images in one folder, masks in another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, SourceError
from loaderkit.sources.files.source import FilesArgs, FilesSource

PAIRS = {"image": "images/*.png", "mask": "masks/*.png"}


def source_of(keys: list[str], fields: dict[str, str], **args: Any) -> FilesSource:
    objects = {key: key.encode() for key in keys}
    return FilesSource(MemoryConnector(objects), FilesArgs.model_validate({"url": "data", "fields": fields, **args}))


def files_of(source: FilesSource, index: int) -> dict[str, str]:
    return {field: range_.key for field, _, range_ in source.ranges(index)}


def scenes(root: Path) -> None:
    """Twelve pairs in which every pixel of a mask can be told from the image's: its level divided by 10."""
    rng = np.random.default_rng(0)
    for number in range(12):
        levels = rng.integers(0, 25, (6, 8)).repeat(8, 0).repeat(8, 1)  # [48, 64], in squares of 8
        for folder, pixels in (("images", np.stack([levels * 10] * 3, -1)), ("masks", levels)):
            (root / folder).mkdir(exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(root / folder / f"{number:02}.png")


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_crops_and_flips_are_those_of_the_image(tmp_path: Path, executor: str) -> None:
    scenes(tmp_path)
    pipeline = (
        Pipeline.files(str(tmp_path), fields=PAIRS)
        .read()
        .decode(masks=["mask"])
        .random_resized_crop(32, interpolation="nearest")
        .random_horizontal_flip()
        .batch(4)
    )
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        batches = list(loader)
    assert sorted(key for batch in batches for key in batch["__key__"]) == [f"images/{n:02}.png" for n in range(12)]
    for batch in batches:
        assert batch["mask"].shape == (4, 1, 32, 32)
        assert torch.equal(batch["image"], (batch["mask"] * 10).expand(-1, 3, -1, -1))


def test_partners_are_found_by_name_and_not_by_place(rng: random.Random) -> None:
    """The image 7.jpg comes before 70.jpg, and the mask 70_mask.png before 7_mask.png."""
    stems = [f"{number}" for number in rng.sample(range(1000), 40)] + ["7000", "70000"]
    keys = [key for stem in stems for key in (f"images/{stem}.jpg", f"masks/{stem}_mask.png")]
    source = source_of(rng.sample(keys, len(keys)), {"image": "images/*.jpg", "mask": "masks/*_mask.png"})
    found = [files_of(source, number) for number in range(len(stems))]
    wanted = sorted(stems, key=lambda stem: f"{stem}.jpg")
    assert found == [{"image": f"images/{stem}.jpg", "mask": f"masks/{stem}_mask.png"} for stem in wanted]


@pytest.mark.parametrize(
    ("fields", "pair"),
    [
        ({"image": "images/*.jpg", "mask": "masks/*.png"}, ("images/7.jpg", "masks/7.png")),
        ({"image": "images/*.{jpg,JPG}", "mask": "masks/*.png"}, ("images/7.JPG", "masks/7.png")),
        ({"image": "images/*", "mask": "masks/*"}, ("images/7.2.jpg", "masks/7.2.png")),
        ({"image": "images/*.*", "mask": "masks/**"}, ("images/a.jpg", "masks/a.png")),
        ({"image": "images/**/*.jpg", "mask": "masks/*/*.png"}, ("images/a/7.jpg", "masks/a/7.png")),
        ({"image": "*.jpg", "mask": "*_mask.png"}, ("7.jpg", "7_mask.png")),
        ({"image": "*/rgb.png", "mask": "*/seg.png"}, ("a/rgb.png", "a/seg.png")),
        ({"image": "left/**/*_left.png", "mask": "fine/**/*_fine.png"}, ("left/x/1_2_left.png", "fine/x/1_2_fine.png")),
        ({"image": "img_???.jpg", "mask": "seg_*.png"}, ("img_007.jpg", "seg_007.png")),
        ({"image": "img_[0-9][0-9].jpg", "mask": "seg_??.png"}, ("img_07.jpg", "seg_07.png")),
    ],
)
def test_what_belongs_together(fields: dict[str, str], pair: tuple[str, str]) -> None:
    source = source_of([*pair, "other/readme.txt"], fields)
    assert [files_of(source, index) for index in range(len(source))] == [dict(zip(fields, pair, strict=True))]


def test_both_in_one_folder_with_one_extension() -> None:
    fields = {"image": "*.png", "mask": "*_mask.png"}
    source = source_of(["a.png", "a_mask.png", "b.png", "b_mask.png"], fields)
    assert [files_of(source, index) for index in range(len(source))] == [
        {"image": f"{name}.png", "mask": f"{name}_mask.png"} for name in "ab"
    ]
    with pytest.raises(SourceError, match=r"1 of 1 files of 'mask' .*: c_mask\.png"):
        source_of(["c_mask.png"], fields)


def test_pairs_whatever_the_order_of_the_partners_and_their_extensions() -> None:
    keys = ["i/a.jpg", "i/a-b.png", "i/b.jpg", "m/a.png", "m/a-b.png", "m/b.bmp", "d/a.npy", "d/a-b.npy", "d/b.npy"]
    source = source_of(keys, {"image": "i/*", "mask": "m/*", "depth": "d/*.npy"}, label="parent")
    assert [source.key(index) for index in range(3)] == ["i/a-b.png", "i/a.jpg", "i/b.jpg"]
    assert files_of(source, 2) == {"image": "i/b.jpg", "mask": "m/b.bmp", "depth": "d/b.npy"}
    assert files_of(source, 0) == {"image": "i/a-b.png", "mask": "m/a-b.png", "depth": "d/a-b.npy"}
    assert source.table(np.arange(3)) is None
    assert source.classes == ["i"]


def test_what_has_no_partner_is_counted_and_named_both_ways() -> None:
    keys = [f"images/{number}.png" for number in range(9)] + [f"masks/{number}.png" for number in range(5, 11)]
    for limit in (None, 1):
        with pytest.raises(SourceError) as caught:
            source_of(keys, PAIRS, limit=limit)
        text = str(caught.value)
        assert "5 of 9 files of 'image' ('images/*.png') have no 'mask' ('masks/*.png'): images/0.png, " in text
        assert "images/2.png, ...; 2 of 6 files of 'mask'" in text
        assert "masks/10.png, masks/9.png. Files belong together" in text


def test_two_files_for_one_field() -> None:
    with pytest.raises(SourceError, match=r"two files of the field 'image'.*stem '1'.*memory://i/1\.png"):
        source_of(["i/1.jpg", "i/1.png", "m/1.png"], {"image": "i/*", "mask": "m/*"})


def test_nothing_there() -> None:
    with pytest.raises(SourceError, match=r"no file below 'data' matches 'images/\*\.png'.*check `url` and `fields`"):
        source_of(["a.txt"], PAIRS)
    with pytest.raises(SourceError, match=r"matches a pattern of `fields`, but it has no extension"):
        source_of(["images/1", "masks/1.png"], {"image": "images/*", "mask": "masks/*"})


def test_a_state_knows_the_partners() -> None:
    fields = {"image": "i/*.jpg", "mask": "m/*.png"}
    digests = {source_of(keys, fields).fingerprint() for keys in (["i/1.jpg", "m/1.png"], ["i/2.jpg", "m/2.png"])}
    objects = {"i/1.jpg": b"i/1.jpg", "m/1.png": b"longer than before"}
    args = FilesArgs.model_validate({"url": "data", "fields": fields})
    assert len(digests | {FilesSource(MemoryConnector(objects), args).fingerprint()}) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"fields": {"image": "images/*.jpg", "mask": "png"}}, "patterns for all fields"),
        ({"fields": PAIRS, "include": "**/*.png"}, "`include` and patterns in `fields` exclude each other"),
        ({"kind": "tar", "fields": PAIRS}, "extensions separated by ';'"),
    ],
)
def test_mistakes_are_said(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaderkit.build(
            {"source": {"kind": "files", "url": "data", **source}, "stages": ["read", {"batch": {"size": 1}}]}
        )


def test_stages_know_the_fields(tmp_path: Path) -> None:
    scenes(tmp_path)
    pipeline = Pipeline.files(str(tmp_path), fields=PAIRS).read().decode(masks=["mask"]).resize([8, 8], fields=["msak"])
    with pytest.raises(ConfigError, match=r"names the field 'msak'.*mask"):
        loaderkit.build(pipeline.batch(2))
    for name in ("masks", "instance_masks", "keypoints", "boxes"):
        named: Any = {"msak": "xyxy"} if name == "boxes" else ["msak"]
        decoded = Pipeline.files(str(tmp_path), fields=PAIRS).read().decode(**{name: named})
        with pytest.raises(ConfigError, match=rf"{name}: it names the field 'msak'.*mask"):
            loaderkit.build(decoded.batch(2))
