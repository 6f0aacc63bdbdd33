"""What is uploaded: the sdist has all that builds it, and its wheel works where the checkout is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
import loaderkit
from loaderkit.native import _kernels
from loaderkit import Pipeline

site = Path(sys.argv[1])
assert Path(loaderkit.__file__).is_relative_to(site), loaderkit.__file__
assert Path(_kernels.__file__).is_relative_to(site), _kernels.__file__
pipeline = Pipeline.dataset([{"x": n} for n in range(10)]).shuffle(seed=1).epochs(1).read().batch(5)
with loaderkit.build(pipeline) as loader:
    print(sorted(x for batch in loader for x in batch["x"].tolist()))
"""


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it alone."""
    if not (ROOT / ".git").exists():
        pytest.fail("the files of a distribution are those that git has: run this in a clone")
    folder = tmp_path_factory.mktemp("built")
    clone = folder / "clone"
    run("git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), clone, cwd=folder)
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, clone, cwd=folder
    )  # the wheel from the sdist
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def tracked() -> set[str]:
    """What git has of the package, at this commit."""
    return {*run("git", "ls-tree", "-r", "--name-only", "HEAD", "loaderkit", cwd=ROOT).split()}


@pytest.mark.integration
def test_nothing_is_left_out(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {*archive.namelist()}
    assert tracked() <= in_sdist
    assert tracked() <= in_wheel
    assert {"LICENSE", "README.md", "pyproject.toml"} <= in_sdist
    others = {name.partition("/")[0] for name in in_wheel} - {"loaderkit"}
    assert [name.endswith(".dist-info") for name in others] == [True]


@pytest.mark.integration
def test_it_runs_in_an_environment_of_its_own(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With what it depends on, which this environment has already, and nothing of the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", site, built[1], cwd=tmp_path)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path) + "\n")
    assert run(python, "-c", PROGRAM, site, cwd=tmp_path).split("\n")[-2] == str([*range(10)])


def test_wheels_are_built_for_every_interpreter_that_is_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions = [line.rpartition(" 3.")[2] for line in project["project"]["classifiers"] if ":: Python :: 3." in line]
    assert {f"cp3{version}-manylinux_*" for version in versions} <= {*project["tool"]["cibuildwheel"]["build"]}
