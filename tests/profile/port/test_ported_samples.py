"""DataLoaders of known kinds as pipelines: drawn ones have the same samples, and what has no counterpart is named."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision_standins
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import loaderkit
from loaderkit.profile.port.check import check_samples
from loaderkit.profile.port.compare import ScriptComparison
from loaderkit.profile.port.loader import PortedPipeline, port_loader
from loaderkit.profile.port.write import write_pipeline


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torchvision_standins.install(monkeypatch)


def ported_of(loader: Any) -> PortedPipeline:
    ported = port_loader(loader, "drawn")
    return ported if ported.pipeline is None else check_samples(ported, loaderkit.build)[0]


def rows(batches: Any) -> list[Any]:
    """Samples of batches that are tuples, sorted: labels or numbers, and sums of the other field."""
    found = []
    for batch in batches:
        fields = [value for name, value in batch.items() if name != "__key__"] if isinstance(batch, dict) else batch
        found += [
            tuple(round(float(field[row].double().sum()), 3) for field in fields) for row in range(len(fields[0]))
        ]
    return sorted(found)


def written(ported: PortedPipeline, folder: Path) -> Any:
    """A loader of the file."""
    assert not ported.unported, ported.unported
    write_pipeline(ported, folder / "p.yaml", "a test")
    assert "# made by a test" in (folder / "p.yaml").read_text()
    return loaderkit.build(folder / "p.yaml")


@pytest.fixture
def folder(photos: Path, tmp_path: Path, rng: random.Random) -> Path:
    """Class folders with drawn names, some of them nested, and files of other kinds among the pictures."""
    root = tmp_path / "a [photos] ${HOME} {x,y}"
    names = rng.sample(["a", "a-b", "a b", "B", "9", "10", "ä", "zz"], 4)
    for number, photo in enumerate(sorted(photos.rglob("*.jpg"))[:40]):
        inner = rng.choice(["", "", "inner/"])
        ending = rng.choice(["jpg", "JPEG", "jpg"])
        target = root / names[number % len(names)] / inner / f"{number:03}.{ending}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, target)
    (root / names[0] / "notes.txt").write_text("no picture")
    return root


def image_folder(torchvision: Any, root: Path, **more: Any) -> Any:
    transforms = torchvision.transforms
    transform = transforms.Compose([transforms.Resize((16, 16)), transforms.PILToTensor()])
    return torchvision.datasets.ImageFolder(str(root), transform=transform, **more)


@pytest.mark.parametrize("kind", ["whole", "first", "split", "split of a split"])
def test_folders_and_parts_of_them(
    kind: str, torchvision: Any, folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    dataset: Any = image_folder(torchvision, folder)
    if kind == "first":
        dataset = Subset(dataset, range(rng.randint(3, 20)))
    for _ in range(kind.count("split")):
        dataset = random_split(dataset, [0.7, 0.3])[rng.randint(0, 1)]
    shuffle, size = rng.random() < 0.5, rng.randint(2, 5)
    loader: Any = DataLoader(dataset, batch_size=size, shuffle=shuffle)
    with written(ported_of(loader), tmp_path) as ours:
        assert len(ours) == len(loader)
        our_batches = [*ours]
        assert all(isinstance(batch, tuple) for batch in our_batches)
        for (_, count), (_, expected) in zip(rows(our_batches), rows(loader), strict=True):
            assert count == expected
        images = [image for image, _ in our_batches]
        expected_images = [image for image, _ in loader]
        sums = [
            sorted(float(one.double().mean()) for batch in batches for one in batch)
            for batches in (images, expected_images)
        ]
        assert all(abs(one - other) < 1 for one, other in zip(*sums, strict=True))


def test_tensors_are_written_beside_the_pipeline(tmp_path: Path, rng: random.Random) -> None:
    number = rng.randint(5, 40)
    dtypes = rng.choices([torch.float32, torch.int64, torch.bfloat16, torch.uint8], k=rng.randint(1, 4))
    tensors = [torch.randint(0, 99, (number, *[2] * rng.randint(0, 3))).to(dtype) for dtype in dtypes]
    dataset: Any = TensorDataset(*tensors)
    if rng.random() < 0.5:
        dataset = random_split(dataset, [0.6, 0.4])[0]
    loader: Any = DataLoader(dataset, batch_size=rng.randint(1, 4), shuffle=rng.random() < 0.5)
    with written(ported_of(loader), tmp_path) as ours:
        assert (tmp_path / "p-tensors.pt").exists()
        batches = [*ours]
        assert [field.dtype for field in batches[0]] == dtypes
        assert rows(batches) == rows(loader)


class Squares(Dataset[Any]):
    """A data set of the script's own. `kind`: what an item is."""

    def __init__(self, number: int, kind: str, is_drawn: bool = False) -> None:
        self.number, self.kind, self.is_drawn = number, kind, is_drawn

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        value = torch.rand(3) if self.is_drawn else torch.full((3,), float(index**2))
        return {"tuple": (value, index), "dict": {"x": value, "y": index}, "tensor": value}[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "tensor"])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_data_set_that_a_module_holds_runs_by_its_name(
    kind: str, is_drawn: bool, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Squares(rng.randint(9, 30), kind, is_drawn)
    module = ModuleType("drawn_data")
    module.__spec__ = object()  # type: ignore[assignment]
    module.train_set = dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drawn_data", module)
    loader: Any = DataLoader(dataset, batch_size=4)
    ported = ported_of(loader)
    with written(ported, tmp_path) as ours:
        assert ported.pipeline is not None
        assert ported.pipeline["source"] == {"kind": "dataset", "object": "drawn_data:train_set"}
        assert "loaderkit cannot see what its __getitem__ does" in " ".join(ported.notes)
        batch, expected = next(iter(ours)), next(iter(loader))
        assert isinstance(batch, tuple if kind == "tuple" else dict)
        if not is_drawn:
            assert rows(ours) == rows(loader) if kind != "tensor" else torch.equal(dict(batch)["0"], expected)


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_order_and_batches_are_those_of_the_loader(kind: Any, rng: random.Random) -> None:
    dataset = TensorDataset(torch.arange(30))
    seed, size = rng.randint(0, 2**40), rng.randint(1, 9)
    drop_last = rng.random() < 0.5
    generator = torch.Generator().manual_seed(seed)
    for options, order in (
        ({}, {"shuffle": "none"}),
        ({"shuffle": True, "generator": generator}, {"shuffle": "global", "seed": seed}),
        (
            {"sampler": torch.utils.data.DistributedSampler(dataset, 2, 1, seed=seed % 2**31)},
            {"shuffle": "global", "seed": seed % 2**31},
        ),
    ):
        loader = kind(dataset, batch_size=size, drop_last=drop_last, **options)
        pipeline = port_loader(loader, "drawn").pipeline
        assert pipeline is not None
        assert pipeline["order"] == order
        assert pipeline["stages"][-1] == {"batch": {"size": size} | ({"drop_last": True} if drop_last else {})}


def own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def own_batches() -> list[list[int]]:
    return [[0, 1], [2]]


UNPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "collate_fn": ("own_collate", {"collate_fn": own_collate}),
    "replacement": ("RandomSampler", {"sampler": RandomSampler(range(20), replacement=True)}),
    "another number": ("RandomSampler", {"sampler": RandomSampler(range(20), num_samples=7)}),
    "some": ("SubsetRandomSampler", {"sampler": SubsetRandomSampler(range(5))}),
    "weights": ("WeightedRandomSampler", {"sampler": WeightedRandomSampler([1.0] * 20, 20)}),
    "batches": ("list", {"batch_sampler": own_batches()}),
    "no batches": ("SequentialSampler", {"batch_size": None}),
}


def test_what_has_no_counterpart_is_named_and_nothing_is_ported(rng: random.Random) -> None:
    dataset: Any = TensorDataset(torch.arange(20))
    for name, (what, options) in UNPORTED.items():
        size = {} if "batch" in name else {"batch_size": rng.randint(1, 5)}
        ported = port_loader(DataLoader(dataset, **{**size, **options}), "drawn")
        assert ported.pipeline is None
        assert [what in one.what for one in ported.unported] == [True], name
    # Several at once are all named.
    both = {**UNPORTED["collate_fn"][1], **UNPORTED["weights"][1]}
    ported = port_loader(DataLoader(Squares(20, "tuple"), batch_size=2, **both), "drawn")
    assert [one.part for one in ported.unported] == ["data set", "collate_fn", "sampler"]
    assert ported.unported[0].where.startswith("test_ported_samples.py:")
    assert ported.unported[1].where == f"test_ported_samples.py:{own_collate.__code__.co_firstlineno}"


def test_an_unknown_transform_is_named_and_where_it_was_written(torchvision: Any, folder: Path) -> None:
    dataset = image_folder(torchvision, folder)
    dataset.transform.transforms[:0] = [torchvision.transforms.v2.RandAugment(3), own_collate]
    ported = port_loader(DataLoader(dataset), "drawn")
    assert ported.pipeline is None
    first, second = ported.unported
    assert (first.part, first.what, first.where) == (
        "transform",
        "torchvision.transforms.v2._auto_augment.RandAugment",
        "torchvision.transforms.v2._auto_augment",
    )
    assert second.what.endswith("own_collate")


def test_samples_that_differ_are_not_passed_off_as_the_same(torchvision: Any, folder: Path, rng: random.Random) -> None:
    hidden = next(folder.rglob("*.jpg"))
    attempts: dict[str, Any] = {}
    attempts["another file list"] = image_folder(torchvision, folder, is_valid_file=lambda path: "3" in Path(path).name)
    shutil.copy(hidden, hidden.with_name(".hidden.jpg"))
    attempts["a hidden file"] = image_folder(torchvision, folder)
    hidden.with_name(".hidden.jpg").unlink()
    attempts["labels"] = image_folder(torchvision, folder)
    attempts["labels"].samples = [(path, (label + 1) % 4) for path, label in attempts["labels"].samples]
    # An object of a known class that does something else after all.
    attempts["pixels"] = image_folder(torchvision, folder)
    attempts["pixels"].transform.transforms[0].__class__ = type(
        "Resize",
        (),
        {"__module__": "torchvision.transforms.transforms", "__call__": lambda self, image: image.resize((16, 16), 0)},
    )
    for name, dataset in attempts.items():
        ported = ported_of(DataLoader(dataset, batch_size=4))
        assert ported.pipeline is None, name
        assert ported.unported[0].part == "samples", name


def test_a_loader_of_another_make_is_named_and_the_script_runs_on() -> None:
    comparison = ScriptComparison("train.py", Path("pipeline.yaml"), force=False, build=loaderkit.build)
    (unported,) = comparison.port(Squares(3, "tuple")).unported
    assert unported.part == "DataLoader"
    assert unported.where.startswith("test_ported_samples.py:")


def test_a_subclass_with_code_of_its_own_is_another_kind(torchvision: Any, folder: Path) -> None:
    kind = type("Own", (torchvision.datasets.ImageFolder,), {"__getitem__": lambda self, index: (torch.zeros(3), 1)})
    assert port_loader(DataLoader(kind(str(folder))), "drawn").unported[0].part == "data set"
    kind = type("Named", (torchvision.datasets.ImageFolder,), {"more": 1})
    dataset = kind(str(folder), transform=image_folder(torchvision, folder).transform)
    assert ported_of(DataLoader(dataset, batch_size=4)).pipeline is not None
    loaders = {"loader": own_collate, "target_transform": own_collate}
    for name, value in loaders.items():
        dataset = image_folder(torchvision, folder, **{name: value})
        ported = port_loader(DataLoader(dataset), "drawn")
        assert ported.pipeline is None
        assert ported.unported[0].what.endswith("own_collate")
