"""`loaderkit port train.py` and `loaderkit watch --compare train.py`: a pipeline that runs, or what has no counterpart."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.data
import torchvision_standins

import loaderkit
from loaderkit.cli import main
from loaderkit.profile.port import measure
from loaderkit.profile.report import Report

FOLDER = """
import sys
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

def augment(image):
    return image

transform = transforms.Compose([
    transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
    transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), {more}
])
if __name__ == "__main__":
    print("begins", sys.argv[1:])
    dataset = torchvision.datasets.ImageFolder({root!r}, transform=transform)
    try:
        for images, labels in DataLoader(dataset, batch_size=8, shuffle=True):
            print("a batch", tuple(images.shape), labels.dtype)
    finally:
        print("cleans up")
    print("ends")
    sys.exit(3)
"""

TENSORS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

train, held_out = (TensorDataset(torch.arange(n).float(), torch.arange(n) % 5) for n in (40, 12))
for epoch in range(2):
    for x, y in DataLoader(train, batch_size=4, shuffle=True):
        pass
    for x, y in DataLoader(held_out, batch_size=4):
        pass
print("ends", torch.initial_seed() == torch.initial_seed())
"""


@pytest.fixture(autouse=True)
def _alone(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_standins.install(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name, seconds in (("_SETTLE_S", 0.05), ("_MOST_S", 0.2), ("_MOVE_S", 0.2), ("_WINDOW_S", 0.02)):
        monkeypatch.setattr(measure, name, seconds)


@pytest.fixture
def script(photos: Path) -> Callable[..., None]:
    def write(more: str = "") -> None:
        Path("train.py").write_text(FOLDER.replace("{root!r}", repr(str(photos))).replace("{more}", more))

    return write


def run(*arguments: str) -> int:
    iterate = torch.utils.data.DataLoader.__iter__
    try:
        return main([*arguments])
    finally:
        assert torch.utils.data.DataLoader.__iter__ is iterate


def test_port_writes_a_pipeline_that_runs_and_ends_the_script_there(
    script: Callable[..., None], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script()
    assert run("port", "-o", "mine.yaml", "train.py", "--lr", "1") == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["begins ['--lr', '1']", "cleans up"]
    assert "DataLoader of ImageFolder (train.py:19)" in said.err
    assert "60 files and their classes are the same; 16 samples" in said.err
    assert "written: " in said.err
    assert {path.name for path in Path().iterdir()} - {"cache"} == {"train.py", "mine.yaml"}
    assert main(["check", "mine.yaml"]) == 0
    with loaderkit.build("mine.yaml") as loader:
        images, labels = next(iter(loader))
        assert (len(loader), images.shape, images.dtype, labels.dtype) == (
            8,
            (8, 3, 24, 24),
            torch.float32,
            torch.int64,
        )
        assert -3 < float(images.min()) < float(images.max()) < 3


def test_port_refuses_what_has_no_counterpart(
    script: Callable[..., None], rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = rng.sample(["transforms.Lambda(augment)", "torchvision.transforms.v2.RandAugment(5)", "augment"], 2)
    script(", ".join(unknown))
    assert run("port", "train.py") == 1
    said = capsys.readouterr()
    assert "no pipeline gives the same samples" in said.err
    named = [line for line in said.err.splitlines() if line.startswith("  transform ")]
    assert [line.split()[1].rpartition(".")[2] for line in named] == [
        "augment" if "augment" in one else "RandAugment" for one in unknown
    ]
    assert "transform augment (train.py:8)" in said.err or "augment" not in unknown
    assert not Path("pipeline.yaml").exists()
    assert "Traceback" not in said.err


def test_nothing_is_overwritten_without_force(script: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    script()
    Path("pipeline.yaml").write_text("mine")
    for command in (["port"], ["watch", "--compare"]):
        assert run(*command, "train.py") == 2
        said = capsys.readouterr()
        assert said.out == ""  # the script was not even begun
        assert "pipeline.yaml is there already" in said.err
    assert Path("pipeline.yaml").read_text() == "mine"
    assert run("port", "--force", "train.py") == 0
    assert "kind: files" in Path("pipeline.yaml").read_text()
    Path("train.py").write_text(TENSORS)
    Path("pipeline.yaml").unlink()
    Path("pipeline-tensors.pt").write_text("mine")
    assert run("port", "train.py") == 2
    assert Path("pipeline-tensors.pt").read_text() == "mine"
    assert not Path("pipeline.yaml").exists()


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("print('no loader')", 1, "took no batch from a DataLoader"),
        ("raise SystemExit(4)", 4, "took no batch from a DataLoader"),
        ("raise KeyError('boom')", 1, "KeyError: 'boom'"),
    ],
)
def test_a_script_that_ends_before_its_first_batch_is_named(
    text: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(text)
    assert run("port", "train.py") == code
    assert says in capsys.readouterr().err
    assert not Path("pipeline.yaml").exists()


def test_a_script_that_catches_everything_is_ported_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    loop = "try:\n    for x, y in DataLoader(train, batch_size=4):\n        pass\nexcept BaseException:\n    print('goes on')\n"
    Path("train.py").write_text(TENSORS.partition("for epoch")[0] + loop)
    assert run("port", "train.py") == 0
    assert capsys.readouterr().out == "goes on\n"
    with loaderkit.build("pipeline.yaml") as loader:
        assert len(loader) == 10


def test_compare_reports_what_the_pipeline_would_bring(
    script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    script()
    assert run("watch", "--compare", "--json", "r.json", "--html", "r.html", "train.py") == 3
    said = capsys.readouterr()
    assert said.out.splitlines()[-2:] == ["cleans up", "ends"]
    assert said.out.count("a batch") == 8
    report = Report.from_json(Path("r.json").read_text())
    ported = report.ported
    assert ported is not None
    assert ported.after is not None
    assert ported.after.samples_per_s > 0
    assert ported.before is not None
    assert ported.step_s is not None
    assert ported.path == str(Path("pipeline.yaml").absolute())
    assert ported.checked is not None
    assert (ported.checked.num_samples, ported.checked.is_random) == (16, True)
    text = " ".join(said.err.split())
    assert "With loaderkit" in text
    assert f"{ported.speedup:.2f} times as fast" in text
    page = Path("r.html").read_text()
    assert '<section id="ported">' in page
    assert f"{ported.after.samples_per_s:.4g} samples/s" in page
    with loaderkit.build("pipeline.yaml") as loader:
        assert len(loader) == 8


def test_each_loader_of_a_script_has_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is made anew for each epoch is one loader."""
    Path("train.py").write_text(TENSORS)
    assert run("watch", "--compare", "--json", "r.json", "train.py") == 0
    assert capsys.readouterr().out == "ends True\n"
    names = sorted(path.name for path in Path().glob("*") if path.name != "cache")
    assert names == [
        "pipeline-2-tensors.pt", "pipeline-2.yaml", "pipeline-tensors.pt", "pipeline.yaml", "r-2.json", "r.json", "train.py"
    ]  # fmt: skip
    with loaderkit.build("pipeline-2.yaml") as loader:
        assert [y for _, labels in loader for y in labels.tolist()] == [n % 5 for n in range(12)]


def test_compare_names_what_has_no_counterpart_and_leaves_the_script_alone(
    script: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    script("augment")
    assert run("watch", "--compare", "--json", "r.json", "train.py") == 3
    said = capsys.readouterr()
    ported = Report.from_json(Path("r.json").read_text()).ported
    assert ported is not None
    assert (ported.path, ported.pipeline, ported.after) == (None, None, None)
    assert [(one.part, one.what, one.where) for one in ported.unported] == [("transform", "augment", "train.py:8")]
    assert "transform augment (train.py:8)" in said.err
    assert not Path("pipeline.yaml").exists()


def test_of_one_batch_no_speed_and_no_step_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(TENSORS.partition("for epoch")[0] + "next(iter(DataLoader(train, batch_size=4)))")
    assert run("watch", "--compare", "--json", "r.json", "train.py") == 0
    ported = Report.from_json(Path("r.json").read_text()).ported
    assert ported is not None
    assert ported.after is not None
    assert (ported.before, ported.step_s, ported.speedup) == (None, None, None)
    assert "the pipeline ran alone" in " ".join(capsys.readouterr().err.split())


def test_a_script_that_failed_is_not_compared(script: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    script()
    text = Path("train.py").read_text().replace("    sys.exit(3)", "    raise KeyError('boom')")
    Path("train.py").write_text(text)
    assert run("watch", "--compare", "--json", "r.json", "train.py") == 1
    ported = Report.from_json(Path("r.json").read_text()).ported
    assert ported is not None
    assert ported.why_not_run == "the script was ended by KeyError"
    assert not Path("pipeline.yaml").exists()
    capsys.readouterr()
