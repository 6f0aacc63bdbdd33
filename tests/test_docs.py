"""The documentation is true: every example runs, every link leads somewhere, the reference is what the code says."""

from __future__ import annotations

import itertools
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from buckets import upload
from doc_data import write_coco, write_pairs, write_sensors, write_zero_run
from doc_examples import LOOPS, examples, libraries, named, needs_cluster, needs_frameworks
from hf_folders import saved
from mixed_photos import write_mixed
from seaweed import Seaweed

import loaderkit
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.cli import main
from loaderkit.connectors import Connector
from profiles.reports import FOLDER, PAGE, filled, text_of

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(str(path.relative_to(ROOT)) for room in ("jobs", "guide") for path in ROOT.glob(f"docs/{room}/*.md"))
SUBJECTS = sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md") if path.name != "reference.md")
BOOK = ("README.md", "docs/index.md", "docs/recipes.md", "docs/reading-a-report.md", *CHAPTERS)
PAGES = [page for page in BOOK if examples(page)]
WITH_FRAMEWORKS = [page for page in PAGES if any(needs_frameworks(text) for _, text in examples(page))]
OF_LOOPS = [
    (page, number)
    for page in PAGES
    for number, (kind, text) in enumerate(examples(page))
    if kind == "python" and libraries(text) & {*LOOPS}
]
# Of what the examples make by themselves, as much as a test needs.
FEW = {
    "make_chats.py": "--chats=64",
    "make_detection.py": "8",
    "make_dlrm.py": "10000",
    "make_segmentation.py": "8",
    "make_sounds.py": "4",
    "make_tokens.py": "--shards=2",
    "make_videos.py": "4",
    "make_volumes.py": "2",
}
MOST_WORDS = 1200
MOST_WORDS_OF = {"README.md": 900, "CONTRIBUTING.md": 500}
FOLDERS = ("docs", "examples", "profiles")
LINKING_PAGES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.md"))
LINKING_PAGES += ["CHANGELOG.md", "CONTRIBUTING.md", "README.md"]
README_PIPELINE = named("README.md", "pipeline.yaml")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is made once for all pages, as data of a user. Shared: a page must not change it."""
    folder = tmp_path_factory.mktemp("made")
    write_mixed(folder / "photos", 36, seed=1)
    table = pa.table({"text": [f"text {number}" for number in range(70)], "label": [*range(7)] * 10})
    (folder / "saved").mkdir()
    for name, data in saved(table, random.Random(1)).items():
        (folder / "saved" / name).write_bytes(data)
    write_coco(folder / "coco")
    write_sensors(folder / "sensors.db")
    write_pairs(folder / "pairs.jsonl")
    return folder


@pytest.fixture
def folder(tmp_path: Path, photos: Path, shards: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: data/train, data/val, data/shards, what `made` has, and the README's pipeline for smaller batches."""
    (tmp_path / "data" / "shards").mkdir(parents=True)
    for name, place in {"train": photos, "val": photos, **{path.name: path for path in made.iterdir()}}.items():
        (tmp_path / "data" / name).symlink_to(place)
    for shard in shards.glob("*.tar"):
        (tmp_path / "data" / "shards" / shard.name).symlink_to(shard)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    monkeypatch.setenv("DECODE", "dali-cpu")  # as the page on DALI says for a machine without a GPU
    (tmp_path / "pipeline.yaml").write_text(README_PIPELINE.replace("size: 64,", "size: 16,"))
    monkeypatch.setattr("loaderkit.cli.profile._HEADROOM_S", 0.2)  # of all CPUs
    monkeypatch.setattr("loaderkit.cli.profile._TRIAL_S", 0.2)
    for name in ("examples", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_zero_run(tmp_path / "runs" / "zero")
    (tmp_path / "bad.jsonl").touch()  # of a run in which nothing was bad
    return tmp_path


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As threads of torch that wait for one another take half the CPU time of the examples that train."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bucket(shards: Path, seaweed: Seaweed, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket of the page on S3."""
    upload(seaweed, shards, "my-bucket", "imagenet/shards/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("page", "also_frameworks"),
    [
        *((page, False) for page in PAGES),
        *(pytest.param(page, True, marks=pytest.mark.integration) for page in WITH_FRAMEWORKS),
    ],
)
def test_examples_run(
    page: str, also_frameworks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In this process: to import torch for each takes longer than all of them."""
    if any("my-bucket" in text for _, text in examples(page)):
        request.getfixturevalue("bucket")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [*sys.argv])  # `loaderkit watch` runs a script in this process
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for number, (kind, text) in enumerate(examples(page)):
        if libraries(text) & {*LOOPS, "ray"} or needs_cluster(text) or text.startswith("# from "):
            continue  # as below, in tests/integrations and in tests/engine/ray
        if needs_frameworks(text) and not also_frameworks:
            continue
        if (module := re.match(r"# (\w+\.py)\n", text)) is not None:
            (folder / module[1]).write_text(text)
        elif kind == "python":
            exec(compile(text, f"{page}, example {number}", "exec"), {"__name__": "example"})
        elif kind == "yaml":
            run_pipeline(text)
        elif kind == "sh":
            run_commands(text, monkeypatch)
        else:  # what a command has printed: the test of the reports does
            assert kind in {"text", "bash"}


def run_pipeline(text: str) -> None:
    """Write it where its first line says, and load an epoch by it."""
    if "apiVersion:" in text:
        assert from_yaml(text)["kind"]
        return
    name = text.splitlines()[0].removeprefix("# ")
    Path(name).write_text(text.replace("size: 64,", "size: 16,"))
    with loaderkit.build(name) as loader:
        assert len(list(loader)) == len(loader)


def run_commands(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of loaderkit, and the examples that make data; others are named to be read."""
    for line in text.splitlines():
        found = re.match(r"((?:\w+=\S+ +)*)(loaderkit|python examples/\S+) +([^#]*)", line)
        if found is None:
            continue
        for assigned in found[1].split():
            name, _, value = assigned.partition("=")
            monkeypatch.setenv(name, os.path.expandvars(value))
        arguments = [os.path.expandvars(word) for word in found[3].split()]
        if found[2] == "loaderkit":
            few = ["--batches", "2"] if arguments[:1] == ["run"] and "--batches" not in arguments else []
            assert main([*arguments, *few]) == 0, line
        else:
            program = found[2].split()[1]
            few = [FEW[Path(program).name]] if Path(program).name in FEW else []
            monkeypatch.setattr(sys, "argv", [program, *arguments, *few])
            runpy.run_path(program, run_name="__main__")


@pytest.mark.integration
@pytest.mark.parametrize(("page", "number"), OF_LOOPS)
def test_examples_of_other_loops_run(page: str, number: int, folder: Path) -> None:
    """As programs of their own, beside the files that the page and the README name."""
    for kind, text in itertools.chain(examples("README.md"), examples(page)):
        if kind == "yaml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text.replace("size: 64,", "size: 16,"))
    example = examples(page)[number][1]
    ran = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", [*MOST_WORDS_OF, *SUBJECTS, *CHAPTERS])
def test_a_page_is_read_in_a_few_minutes(page: str) -> None:
    """All but the reference, in which one looks things up."""
    assert len((ROOT / page).read_text().split()) <= MOST_WORDS_OF.get(page, MOST_WORDS)


def test_all_pages_but_the_reference_are_read_in_three_hours() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    prose = [re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages]
    num_words = [len(text.split()) for page, text in zip(pages, prose, strict=True) if page.name != "reference.md"]
    assert sum(num_words) <= 45_000


def test_what_pages_show_of_programs_stands_in_them() -> None:
    for page, (_, text) in itertools.chain.from_iterable(
        zip(itertools.repeat(page), examples(page), strict=False) for page in PAGES
    ):
        if (found := re.match(r"# from (\S+\.py)\n", text)) is not None:
            assert text.partition("\n")[2] in (ROOT / found[1]).read_text(), (page, found[1])


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_shells_are_well_formed(page: str) -> None:
    for kind, text in examples(page):
        if kind in {"sh", "bash"}:
            ran = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", LINKING_PAGES)
def test_every_block_of_code_ends(page: str) -> None:
    """The rest of the page would be code, and its examples none."""
    lines = (ROOT / page).read_text().splitlines()
    assert sum(line.lstrip().startswith("```") for line in lines) % 2 == 0


@pytest.mark.parametrize("page", LINKING_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_the_architecture_names_files_and_rooms_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "loaderkit"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    named = re.findall(r"[\w/]+\.py", page)
    assert len(named) > 40
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []
    assert [name for name in re.findall(r"\b(?:\w+/)+(?=\s)", page) if not (package / name).is_dir()] == []
    rooms = {path.parent.name for path in package.glob("*/__init__.py")} | {"errors", "joint_start", "loader"}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == rooms


@pytest.mark.parametrize("script", ["make_reference.py", "make_stubs.py"])
def test_what_is_made_from_the_code_is_up_to_date(script: str) -> None:
    ran = subprocess.run([sys.executable, ROOT / "docs" / script, "--check"])
    assert ran.returncode == 0, f"run: python docs/{script}"


def test_the_reference_has_what_is_public() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    for name in {*loaderkit.__all__} - {"__version__"}:
        assert f"### `loaderkit.{name}`" in page
    for owner in (loaderkit.Loader, loaderkit.Pipeline, Connector):
        public = [name for name in vars(owner) if not name.startswith("_") and name != "as_subject"]
        assert len(public) >= 5
        assert [name for name in public if f" def {name}(" not in page] == []


def test_reports_on_the_page_are_those_that_were_made() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "run: python -m profiles.reports --render"
    for path in FOLDER.glob("*.json"):
        assert path.with_suffix(".txt").read_text() == text_of(path), path
        assert len(max(path.with_suffix(".txt").read_text().splitlines(), key=len)) <= 80
    assert page.count("```text") == 5


def test_the_make_targets_the_readme_names_exist() -> None:
    named = set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "prove"} <= named & targets
    assert from_yaml(README_PIPELINE)["stages"][0] == "read"
