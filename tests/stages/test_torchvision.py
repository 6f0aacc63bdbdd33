"""torchvision's own v2 transforms in a `call`, with and without `seeded`, and in a data set."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_transforms as transforms

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main

NAME = "torchvision_transforms:"  # not the objects: in another process these would import torchvision alone
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def taken(pipeline: Pipeline, most: int = 6, state: Any = None, **prefetch: Any) -> tuple[list[torch.Tensor], Any]:
    """The images of the next batches of two epochs, and the state after them."""
    overrides = {f"prefetch.{name}": value for name, value in prefetch.items()}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = (batch for _ in range(2) for batch in loader)
        return [batch["image"] for _, batch in zip(range(most), batches, strict=False)], loader.state_dict()


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def reading(photos: Path) -> Pipeline:
    return Pipeline.files(photos, label="parent").shuffle(seed=random.randrange(2**32)).epochs(2).read().decode()


def test_seeded_they_are_the_same_whatever_runs_them(photos: Path) -> None:
    pipeline = reading(photos).call(NAME + "augment", seeded=True).batch(20).call(NAME + "normalize")
    expected, _ = taken(pipeline, executor="inline")
    assert len(expected) == 6
    assert expected[0].shape == (20, 3, 24, 24)
    assert expected[0].dtype == torch.float32
    assert not torch.equal(expected[0], expected[3])
    first, state = taken(pipeline, 2, executor="inline")
    assert_equal(first, expected[:2])
    assert_equal(taken(pipeline, 6, state, executor="process", processes=2)[0], expected[2:])


def test_unseeded_they_run_in_threads_and_check_says_what_they_draw(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = reading(photos).call(transforms.augment).batch(20).normalize()
    batches, _ = taken(pipeline, executor="thread")
    assert [batch.shape for batch in batches] == [(20, 3, 24, 24)] * 6
    file = tmp_path / "unseeded.yaml"
    stages = "read, decode, call: {function: 'torchvision_transforms:augment'}, batch: {size: 4}"
    file.write_text(f"source: {{kind: files, url: {photos}}}\nstages: [{stages}]\n")
    assert main(["check", str(file)]) == 0
    assert "call draws from global generators (torch)" in capsys.readouterr().out


def test_a_mask_goes_with_its_image(photos: Path) -> None:
    def with_mask(sample: dict[str, Any]) -> None:
        sample["image"][:] = sample["image"][:1] // 128 * 255
        sample["mask"] = sample["image"][:1] // 255

    pipeline = reading(photos).call(with_mask).call(transforms.augment_with_mask, name="augment").batch(20)
    with loaderkit.build(pipeline) as loader:
        for batch in loader:
            assert batch["image"].shape[1:] == (3, 24, 24)
            assert batch["mask"].shape[1:] == (1, 24, 24)
            assert {*batch["mask"].unique().tolist()} <= {0, 1}
            assert ((batch["image"][:, :1] > 127) == batch["mask"].bool()).float().mean() > 0.8, "all but edges"


def test_batches_are_mixed_as_in_any_loop(photos: Path) -> None:
    pipeline = reading(photos).resize([24, 24]).batch(20).normalize().call(transforms.mix)
    with loaderkit.build(pipeline) as loader:
        batch = next(iter(loader))
    assert batch["image"].shape == (20, 3, 24, 24)
    assert batch["label"].shape == (20, 3)
    assert batch["label"].sum(1).allclose(torch.ones(20))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("kind", ["tensor", "image", "pillow"])
def test_in_a_data_set(photos: Path, executor: str, kind: str) -> None:
    args = {"folder": str(photos), "kind": kind}
    source = Pipeline.dataset("torchvision_transforms:Photos", args=args, fields=["image", "number"])
    pipeline = source.shuffle(False).read().batch(16)
    if kind != "tensor":
        pipeline = source.shuffle(False).read().decode().batch(16)
    data: Any = transforms.Photos(str(photos), kind)
    expected = [data[number][0] for number in range(len(data))]
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        images = [image for batch in loader for image in batch["image"]]
        assert type(images[0]) is torch.Tensor
    for image, wanted in zip(images, expected, strict=True):
        assert torch.equal(image, transforms.v2.functional.pil_to_tensor(wanted) if kind == "pillow" else wanted)


def test_an_image_folder(photos: Path) -> None:
    """Its own `transform` or our stages: the same pixels either way, and the classes of `kind: files`."""
    folder = Pipeline.dataset(transforms.data_sets.ImageFolder(photos), fields=["image", "label"])
    pictures = folder.shuffle(False).read().decode().center_crop(40).batch(16)
    cropped = transforms.data_sets.ImageFolder(photos, transforms.v2.Compose([transforms.v2.CenterCrop(40)]))
    transformed = Pipeline.dataset(cropped, fields=["image", "label"]).shuffle(False).read().decode().batch(16)
    files = Pipeline.files(photos, label="parent").shuffle(False).read().decode().center_crop(40).batch(16)
    with loaderkit.build(pictures) as one, loaderkit.build(transformed) as other, loaderkit.build(files) as third:
        assert one.classes == other.classes == third.classes
        for batch, same, as_files in zip(one, other, third, strict=True):
            assert torch.equal(batch["image"], same["image"])
            assert torch.equal(batch["image"], as_files["image"])
            assert batch["label"].tolist() == same["label"].tolist() == as_files["label"].tolist()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("BoundingBoxes", {"boxes": {"shape": "xyxy"}}),
        ("KeyPoints", {"keypoints": ["shape"]}),
        ("Mask", {"masks": ["shape"]}),
    ],
)
def test_what_moves_with_an_image_is_named_or_refused(kind: str, named: dict[str, Any]) -> None:
    """A box that stays where it was while its image is cropped would be silently wrong."""
    tv: Any = transforms.tv_tensors
    given: dict[str, Any] = {
        "BoundingBoxes": tv.BoundingBoxes([[4, 6, 9, 8]], format="XYXY", canvas_size=(20, 30)),
        "KeyPoints": tv.KeyPoints([[4.0, 6.0]], canvas_size=(20, 30)),
        "Mask": tv.Mask(torch.ones(1, 20, 30, dtype=torch.uint8)),
    }
    data = [{"image": torch.zeros(3, 20, 30, dtype=torch.uint8), "shape": given[kind]} for _ in range(8)]

    def first(**args: Any) -> Any:
        pipeline = Pipeline.dataset(data).shuffle(False).read().decode(**args).center_crop([10, 30]).batch(8)
        with loaderkit.build(pipeline) as loader:
            return next(iter(loader))["shape"]

    argument = next(iter(named))
    with pytest.raises(
        loaderkit.errors.LoaderkitError, match=f"torchvision's {kind}, .*name it, `decode: {{{argument}: "
    ):
        first()
    moved = first(**named)
    expected = {"BoundingBoxes": [[4, 1, 9, 3]], "KeyPoints": [[4, 1]], "Mask": [[[1] * 30] * 10]}[kind]
    assert moved[0].tolist() == expected
    assert type(moved) is torch.Tensor
