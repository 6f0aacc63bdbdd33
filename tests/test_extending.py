"""The package of docs/extending.md, built from the page, installed without the tree, and used by its entry points alone."""

from __future__ import annotations

import importlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_examples import examples, named
from extensions import forget_after

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError

PAGE = "docs/extending.md"
MOST_LINES = 60
NUM = 40


def files_of_page() -> dict[str, str]:
    """Path -> text of the files that the page shows, and of the connector on the page that it links to."""
    found = [(re.match(r"# ([\w./]+\.\w+)\n", text), text) for _, text in examples(PAGE)]
    connector = {"photo_tools/archive.py": named("docs/jobs/own-store.md", "archive.py")}
    return connector | {match[1]: text for match, text in found if match is not None}


def install(folder: Path, files: dict[str, str], site: Path) -> None:
    """Write a package's files into `folder`, and install it into `site` by pip, without a network."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page's package, with `site` in it, where it is installed."""
    folder = tmp_path_factory.mktemp("photo-tools")
    install(folder, {"photo_tools/__init__.py": "", **files_of_page()}, folder / "site")
    return folder


@pytest.fixture
def site(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """It is importable in this process, and what is learnt of it forgotten afterwards."""
    forget_after(monkeypatch)
    monkeypatch.syspath_prepend(package / "site")
    yield package / "site"
    if (archive := sys.modules.get("photo_tools.archive")) is not None:
        archive.opened.cache_clear()  # closes the files now, and not when the module is collected
    for name in [name for name in sys.modules if name.partition(".")[0] == "photo_tools"]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: photos.db, data/photos.zip, and the page's photos.yaml with smaller batches."""
    paths = sorted(photos.rglob("*.jpg"))[:NUM]
    with closing(sqlite3.connect(tmp_path / "photos.db")) as connection:
        connection.execute("CREATE TABLE photos (image BLOB, label INTEGER)")
        rows = [(path.read_bytes(), number % 5) for number, path in enumerate(paths)]
        connection.executemany("INSERT INTO photos VALUES (?, ?)", rows)
        connection.commit()
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "photos.zip", "w") as archive:
        for path in paths:
            archive.write(path, path.relative_to(photos))
    yaml = files_of_page()["photos.yaml"].replace("size: 16", "size: 8")
    (tmp_path / "photos.yaml").write_text(yaml + "order: {epochs: 1}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def batches_of(pipeline: Any, **prefetch: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, overrides={f"prefetch.{key}": value for key, value in prefetch.items()}) as loader:
        return list(loader)


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a["__key__"] == b["__key__"] and torch.equal(a["image"], b["image"]) for a, b in zip(one, other, strict=True)
    )


def solarized(**arguments: Any) -> Pipeline:
    read = Pipeline.files("zip://data/photos.zip", include="**/*.jpg", label="parent").epochs(1).read().decode()
    described = read.resize([64, 64])
    described = described.solarize(**arguments) if arguments else described  # type: ignore[attr-defined]
    return described.batch(8)


def test_a_source_a_stage_and_a_connector_are_short() -> None:
    files = files_of_page()
    for name in ("sqlite", "solarize", "archive"):
        assert len(files[f"photo_tools/{name}.py"].splitlines()) <= MOST_LINES


@pytest.mark.integration
@pytest.mark.fresh_interpreters
def test_its_contract_suites_pass(package: Path) -> None:
    """In an interpreter that has the installed package, and not the folder it was built from."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    paths = [str(package / "site"), *filter(None, sys.path)]
    done = subprocess.run(
        [*command, f"--rootdir={package / 'tests'}", "--import-mode=importlib", str(package / "tests")],
        cwd=package / "tests",
        env={**_environment(), "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    num_passed = re.search(r"(\d+) passed", done.stdout)
    assert num_passed is not None
    assert int(num_passed[1]) > 35


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


@pytest.mark.parametrize("prefetch", [{"executor": "thread"}, {"executor": "process", "processes": 2}], ids=str)
def test_yaml_names_all_of_it(site: Path, folder: Path, prefetch: dict[str, Any]) -> None:
    expected = batches_of("photos.yaml", executor="inline")
    assert sum(len(batch["label"]) for batch in expected) == NUM
    assert sorted(int(key) for batch in expected for key in batch["__key__"]) == [*range(1, NUM + 1)]
    assert same(batches_of("photos.yaml", **prefetch), expected)


@pytest.mark.integration
def test_ray_runs_it(site: Path, folder: Path) -> None:
    prefetch = {"executor": "ray", "processes": 2, "ray": {"address": "local"}}
    assert same(batches_of("photos.yaml", **prefetch), batches_of("photos.yaml", executor="inline"))


def test_it_resumes_exactly(site: Path, folder: Path) -> None:
    whole = batches_of("photos.yaml")
    with loaderkit.build("photos.yaml") as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = json.dumps(loader.state_dict())
    with loaderkit.build("photos.yaml", overrides={"prefetch.executor": "process"}) as loader:
        loader.load_state_dict(json.loads(state))
        assert same(list(loader), whole[2:])


def test_python_names_all_of_it(site: Path, folder: Path) -> None:
    """Pixels from the threshold on are inverted, in every picture with p = 1 and in none with p = 0."""
    plain: dict[str, torch.Tensor] = {}
    for batch in batches_of(solarized()):
        plain.update(zip(batch["__key__"], batch["image"], strict=True))
    for batch in batches_of(solarized(threshold=100, p=1.0)):
        for key, image in zip(batch["__key__"], batch["image"], strict=True):
            assert torch.equal(image, torch.where(plain[key] < 100, plain[key], 255 - plain[key]))
    for batch in batches_of(solarized(threshold=100, p=0.0)):
        assert all(torch.equal(image, plain[key]) for key, image in zip(batch["__key__"], batch["image"], strict=True))
    sqlite = Pipeline.sqlite(url="photos.db", table="photos")  # type: ignore[attr-defined]
    assert sqlite.read().batch(1).to_yaml().count("kind: sqlite") == 1
    assert {"sqlite", "solarize"} <= {*dir(Pipeline)}
    assert "probability" in Pipeline.solarize.__doc__  # type: ignore[attr-defined]


def test_check_and_explain_list_it(site: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "explain"):
        assert main([command, "photos.yaml", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["extensions"]
        assert listed == [
            {"what": "kind of source", "name": "sqlite", "origin": "photo-tools 1.0"},
            {"what": "stage", "name": "solarize", "origin": "photo-tools 1.0"},
        ]
        assert main([command, "photos.yaml"]) == 0
        assert "stage solarize, of photo-tools 1.0" in capsys.readouterr().out
    solarized(p=0.5).named("zipped")
    (folder / "zipped.yaml").write_text(solarized(p=0.5).to_yaml())
    assert main(["check", "zipped.yaml"]) == 0
    assert "connector zip, of photo-tools 1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("replaced", "by", "line", "said"),
    [
        ("solarize:", "solarise:", 7, "unknown stage 'solarise'; did you mean 'solarize'?"),
        ("kind: sqlite", "kind: sqlit", 2, "unknown kind 'sqlit'; did you mean 'sqlite'?"),
        ("threshold: 100", "treshold: 100", 7, "unknown key 'treshold'; did you mean 'threshold'?"),
        ("threshold: 100", "threshold: 300", 7, "less than or equal to 255, not 300"),
        ("table: photos", "table: 7", 2, "expected text, not 7"),
        (", table: photos", "", 2, "'table' is missing: its table"),
    ],
)
def test_mistakes_are_refused_like_ours(site: Path, folder: Path, replaced: str, by: str, line: int, said: str) -> None:
    path = folder / "photos.yaml"
    assert replaced in path.read_text()
    path.write_text(path.read_text().replace(replaced, by))
    with pytest.raises(ConfigError) as raised:
        loaderkit.build(path)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)
    assert raised.value.problems[0].line == line


def test_a_scheme_is_suggested(site: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no connector for zpi://; did you mean 'zip'\?"):
        batches_of(Pipeline.files("zpi://data/photos.zip").read().batch(8))
    with pytest.raises(AttributeError, match=r"'solarise'; did you mean 'solarize'"):
        solarized().solarise()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'sqlit'; did you mean 'sqlite'"):
        Pipeline.sqlit(url="x")  # type: ignore[attr-defined]


def test_commands_read_from_it(site: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint in an archive is restored through the connector of the package."""
    weights = {"weight": torch.arange(12.0).reshape(3, 4)}
    torch.save(weights, folder / "model.pt")
    with zipfile.ZipFile(folder / "run.zip", "w") as archive:
        archive.write("model.pt", "step-1/model.pt")
    assert torch.equal(loaderkit.restore(f"zip://{folder}/run.zip/step-1/model.pt")["weight"], weights["weight"])
    assert main(["restore", f"zip://{folder}/run.zip/step-1/model.pt"]) == 0
    assert "1 tensor" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- what goes wrong

BROKEN = {
    "pyproject.toml": (
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "other-tools"\nversion = "2.0"\n'
        '[project.entry-points."loaderkit.stages"]\nsolarize = "other_tools:SOLARIZE"\nresize = "other_tools:RESIZE"\n'
        'broken = "other_tools:BROKEN"\n'
        '[project.entry-points."loaderkit.sources"]\nodd = "json:dumps"\n'
        '[project.entry-points."loaderkit.connectors"]\nlost = "other_tools:LOST"\nbare = "zipimport:zipimporter"\n'
        '[tool.setuptools]\npy-modules = ["other_tools"]\n'
    ),
    "other_tools.py": "import module_that_is_nowhere\n",
}


@pytest.fixture(scope="module")
def other_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that claims a name of photo-tools' and one of ours, and cannot be imported."""
    folder = tmp_path_factory.mktemp("other-tools")
    install(folder, BROKEN, folder / "site")
    return folder / "site"


@pytest.fixture
def with_other(other_package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_after(monkeypatch)
    monkeypatch.syspath_prepend(other_package)
    importlib.invalidate_caches()
    return folder


def yaml_with(folder: Path, *, kind: str = "dataset", stage: str = "resize: {size: 8}") -> Path:
    path = folder / "tried.yaml"
    path.write_text(
        f"source: {{kind: {kind}, object: 'builtins:dict'}}\n\nstages:\n  - read\n  - {stage}\n  - batch: {{size: 1}}\n"
    )
    return path


def test_one_that_cannot_be_imported_is_named_where_it_is_used(with_other: Path) -> None:
    path = yaml_with(with_other, stage="broken")
    with pytest.raises(ConfigError) as raised:
        loaderkit.build(path)
    message = str(raised.value)
    assert raised.value.problems[0].line == 5
    for part in ("'broken'", "other-tools 2.0", "other_tools:BROKEN", "module_that_is_nowhere"):
        assert part in message
    path.write_text("source:\n  kind: files\n  url: lost://x\nstages: [read, {batch: {size: 1}}]\n")
    with pytest.raises(ConfigError, match=r"line 3: source\.url: the connector 'lost' of the package other-tools 2\.0"):
        loaderkit.build(path)
    path.write_text(path.read_text().replace("lost:", "bare:"))
    with pytest.raises(ConfigError) as raised:
        loaderkit.build(path)
    assert (
        "the connector 'bare' of the package other-tools 2.0 (zipimport:zipimporter) is the class zipimporter(path)"
        in (str(raised.value))
    )
    with pytest.raises(
        ConfigError, match=r"'odd' of the package other-tools 2\.0 .* is the function dumps\(obj, .*\), and has to be"
    ):
        loaderkit.build(yaml_with(with_other, kind="odd"))


def test_two_that_claim_a_name_are_both_named(with_other: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"line 7: .*'solarize' is claimed by .*other-tools 2\.0.* and .*photo-tools 1\.0"
    ):
        loaderkit.build("photos.yaml")
    # A pipeline of ours asks for no package; `check` looks for claims of our names.
    assert len(batches_of(solarized())) == NUM // 8
    (with_other / "resized.yaml").write_text(solarized().to_yaml())
    assert main(["check", "resized.yaml"]) == 2
    said = capsys.readouterr().err
    assert "'resize'" in said
    assert "loaderkit itself" in said
    assert "other-tools 2.0" in said


def test_a_plain_pipeline_asks_for_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**group: str) -> None:
        raise AssertionError("entry points were read")

    monkeypatch.setattr("loaderkit._internal.extensions.entry_points", refuse)
    pipeline = Pipeline.dataset([{"x": 1}, {"x": 2}]).epochs(1).read().call(dict).batch(1)
    assert len(batches_of(pipeline)) == len(batches_of(pipeline, executor="process")) == 2


def test_packages_are_read_again_only_where_a_folder_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hasattr` and `inspect` ask for names that nobody has, and what was installed meanwhile is there at once."""
    read: list[str] = []

    def counted(*, group: str) -> EntryPoints:
        read.append(group)
        return entry_points(group=group)

    monkeypatch.setattr("loaderkit._internal.extensions.entry_points", counted)
    installed = [folder for folder in sys.path if "site-packages" in folder]  # others may change meanwhile
    monkeypatch.setattr(sys, "path", [str(tmp_path), *installed])
    for _ in range(5):
        assert not hasattr(Pipeline, "posterized")
        assert not hasattr(Pipeline, "__wrapped__")
    assert sorted(read) == ["loaderkit.sources", "loaderkit.stages"]
    (tmp_path / "posters-1.0.dist-info").mkdir()
    (tmp_path / "posters-1.0.dist-info" / "METADATA").write_text("Name: posters\nVersion: 1.0\n")
    (tmp_path / "posters-1.0.dist-info" / "entry_points.txt").write_text(
        "[loaderkit.stages]\nposterized = loaderkit.stages.image.color:GAUSSIAN_BLUR\n"
    )
    assert "posterized" in dir(Pipeline)
    assert sorted(read) == sorted(2 * ["loaderkit.sources", "loaderkit.stages"])
