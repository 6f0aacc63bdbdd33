"""Scripts with torchvision itself, and Hugging Face's datasets, as pipelines."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torchvision_transforms
from drawn_transforms import check_drawn_chain, checked, transforms_of
from torch.utils.data import DataLoader

import loaderkit
from loaderkit.profile.port.check import check_samples
from loaderkit.profile.port.loader import port_loader
from loaderkit.profile.port.transforms import port_transforms
from loaderkit.profile.port.write import write_pipeline

pytestmark = pytest.mark.filterwarnings("ignore:The transform `ToTensor")


@pytest.fixture
def torchvision() -> Any:
    return SimpleNamespace(transforms=importlib.import_module("torchvision.transforms"))


@pytest.mark.parametrize("number", range(12))
def test_drawn_chains_give_torchvisions_own_pixels(
    number: int, torchvision: Any, photos: Path, rng: random.Random
) -> None:
    check_drawn_chain(torchvision, torchvision_transforms.data_sets, photos, rng)


def test_random_transforms_have_the_attributes_that_are_read(torchvision: Any, rng: random.Random) -> None:
    module = transforms_of(torchvision, rng)
    size, p = rng.randint(16, 40), rng.random()
    chain = module.Compose(
        [
            module.RandomRotation(rng.randint(1, 40), expand=True),
            module.RandomCrop(size, padding=rng.choice([None, 3]), pad_if_needed=True),
            module.RandomResizedCrop(size, scale=(0.3, 0.9)),
            module.RandomHorizontalFlip(p),
            module.RandomVerticalFlip(p),
            module.ColorJitter(0.4, (0.5, 1.5), hue=0.1),
            module.RandomGrayscale(p),
            module.GaussianBlur(5),
            module.ToTensor(),
            module.Normalize([0.5] * 3, [0.2] * 3),
            module.RandomErasing(p),
        ]
    )
    ported = port_transforms(chain)
    assert len(ported.stages) == 9
    assert ported.stages[3] == {"random_horizontal_flip": {"p": p}}
    assert ported.stages[8]["random_erasing"]["value"] == 128  # the mean
    stages = ["read", "decode", *ported.stages, {"batch": {"size": 2}}, {"normalize": ported.normalize}]
    config = loaderkit.Pipeline({"source": {"kind": "files", "url": "x"}, "stages": stages}).config
    assert len(config.stages) == len(stages)


def test_a_training_chain_of_tutorials_gives_as_bright_pictures(torchvision: Any, photos: Path) -> None:
    """Drawn crops and colours cannot be compared one by one: their means over all pictures."""
    v2 = torchvision.transforms.v2
    chain = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop((24, 24)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3, 0.3, 0.1),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = torchvision_transforms.data_sets.ImageFolder(str(photos), transform=chain)
    loader: Any = DataLoader(dataset, batch_size=60)
    pipeline = checked(loader).pipeline
    assert pipeline is not None
    with loaderkit.build(loaderkit.Pipeline(pipeline)) as ours:
        mean, our_mean = (
            torch.stack([next(iter(one))[0].as_subclass(torch.Tensor).mean((0, 2, 3)) for _ in range(3)]).mean(0)
            for one in (loader, ours)
        )
    assert torch.allclose(mean, our_mean, atol=0.15)


@pytest.mark.parametrize("kind", ["plain", "torch", "columns", "of two files", "rows", "in memory", "function"])
def test_hugging_face(kind: str, tmp_path: Path, rng: random.Random) -> None:
    number = rng.randint(8, 30)
    columns = {
        "ids": [[rng.randint(0, 99) for _ in range(4)] for _ in range(number)],
        "loss": [rng.random() for _ in range(number)],
        "label": [*range(number)],
    }
    if kind == "plain":
        del columns["ids"]  # default_collate makes four tensors of these lists
    dataset = datasets.Dataset.from_dict(columns)
    if kind != "in memory":
        dataset.save_to_disk(tmp_path / "saved", num_shards=2 if kind == "of two files" else 1)
        dataset = datasets.load_from_disk(tmp_path / "saved")
    if kind == "rows":
        dataset = dataset.shuffle(seed=1)
    if kind == "function":
        dataset.set_transform(lambda rows: rows)
    elif kind != "plain":
        dataset = dataset.with_format("torch", columns=["ids", "label"] if kind == "columns" else None)
    loader: Any = DataLoader(dataset, batch_size=3)
    ported = port_loader(loader, "drawn")
    if kind in ("rows", "in memory", "function"):
        assert ported.pipeline is None
        assert ported.unported[0].part == "data set"
        return
    ported, _ = check_samples(ported, loaderkit.build)
    assert not ported.unported, ported.unported
    write_pipeline(ported, tmp_path / "p.yaml", "a test")
    with loaderkit.build(tmp_path / "p.yaml") as ours:
        for batch, our_batch in zip(loader, ours, strict=True):
            assert batch.keys() == our_batch.keys() - {"__key__"}
            assert all(torch.equal(batch[name], our_batch[name]) for name in batch)
            assert all(batch[name].dtype == our_batch[name].dtype for name in batch)
