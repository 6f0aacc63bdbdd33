"""Nothing executes data: odd files under wrong names go through everything that reads, and nothing is run, fetched, imported or
written outside. See docs/security.md."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import odd_files
import pytest
from odd_files import MODULES, OUTSIDE, PROGRAMS, Odd

pytestmark = pytest.mark.filterwarnings("ignore:IM image format:DeprecationWarning")
ROOT = Path(__file__).parents[1]


def prepare(folder: Path) -> dict[str, str]:
    """Programs and modules that note that they were called, where both are looked for first; the environment for that."""
    programs, modules, called = folder / "programs", folder / "modules", folder / "called"
    for place in (programs, modules, folder / "work" / "odd", folder / "work" / "home"):
        place.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\necho {name} \"$@\" >> '{called}'\n")
        (programs / name).chmod(0o755)
    for name in MODULES:
        (modules / f"{name}.py").write_text(
            f"open({str(called)!r}, 'a').write('import {name}\\n')\ndef main(*_): pass\n"
        )
    for name in ("json", "pickle", "numpy", "torch"):  # where one works may lie files of any name
        (folder / "work" / f"{name}.py").write_text(
            f"open({str(called)!r}, 'a').write('import {name} of the folder\\n')\n"
        )
    work = folder / "work"
    return {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{modules}", "HOME": str(work / "home"),
        "TMPDIR": str(work / "home"), "LOADERKIT_CACHE_DIR": str(work / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def guarded(folder: Path, files: list[Odd], *what: str) -> dict[str, Any]:
    """What the guard saw, and what was called, while these files were read (or `what` was done instead)."""
    environment = prepare(folder)
    for odd in files:
        (folder / "work" / "odd" / odd.name).write_bytes(odd.data)
        (folder / "work" / "odd" / odd.name).chmod(0o755)
    report = folder / "work" / "report.json"
    command = [
        sys.executable,
        "-P",
        *map(str, (ROOT / "tests" / "helpers" / "odd_guard.py", folder / "work", report, *what)),
    ]
    ran = subprocess.run(command, cwd=folder / "work", env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(report.read_text())
    called = folder / "called"
    return found | {"called": Counter(called.read_text().splitlines()) if called.exists() else {}}


def check(folder: Path, num: int, rng: random.Random) -> None:
    files = [*odd_files.odd_files(rng, num)]
    before = {odd.name: odd.data for odd in files}
    found = guarded(folder, files)
    assert not found["seen"], "\n".join([f"{len(found['seen'])} events", *list(found["seen"])[:20]])
    assert not found["called"], found["called"]
    assert {path.name: path.read_bytes() for path in (folder / "work" / "odd").glob("[0-9]*")} == before
    assert not [*folder.rglob("*escaped*"), *folder.parent.glob("*escaped*")]
    assert not Path(OUTSIDE).exists()
    assert not found["raw"], found["raw"]
    assert sum(found["failures"].values()) > num  # they were looked at, and refused
    assert len((folder / "work" / "bad.jsonl").read_text().splitlines()) > num / 3


def test_nothing_is_executed(tmp_path: Path, rng: random.Random) -> None:
    check(tmp_path, len(odd_files.MAKERS), rng)


@pytest.mark.prove
def test_nothing_is_executed_of_thousands(tmp_path: Path, rng: random.Random) -> None:
    check(tmp_path, 50 * len(odd_files.MAKERS), rng)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
PICKLE = b"cos\nsystem\n(S'touch odd'\ntR."


TRUSTING = {
    "pickle-1": (PICKLE, "os.system"),
    "pickle-2": (PICKLE, "pickle.find_class"),
    "pickle-3": (b"cantigravity\nmain\n)R.", "import"),
    "numpy-1": (PICKLE, "pickle.find_class"),
    "torch-1": (PICKLE, "os.system"),
    "yaml-1": (b"!!python/object/apply:subprocess.Popen [[touch, odd]]", "subprocess.Popen"),
    "yaml-2": (b"!!python/module:odd_payload", "import"),
    "tar-1": (odd_files.archive_of([("../../escaped", b"x")]), "open"),
    "eval-1": (b"__import__('this')", "compile"),
    "eval-2": (b"open('../escaped', 'w')", "open"),
    "pillow-1": (POSTSCRIPT, "subprocess.Popen"),
    "read-1": (b"/etc/passwd", "open"),
    "fetch-1": (b"", "socket.connect"),
}


def test_the_guard_notices(tmp_path: Path) -> None:
    """What is done by readers that trust their data. Or the tests above would prove nothing."""
    found = guarded(tmp_path, [Odd("", name, data) for name, (data, _) in TRUSTING.items()], "misbehave")
    missed = [
        name for name, (_, event) in TRUSTING.items() if not any(f"{name}: {event}(" in seen for seen in found["seen"])
    ]
    assert not missed, found
    assert {"touch odd", "import odd_payload", "import antigravity", "import this"} <= found["called"].keys()
    assert any(called.startswith("gs ") for called in found["called"])


RUN = "import sys; from loaderkit.cli import main; sys.exit(main(['run', 'p.json', '--set', 'prefetch.executor=process']))"
DEMO = "from loaderkit.cli.demo.show import _train_until_killed; _train_until_killed('nowhere', 1)"


@pytest.mark.prove
@pytest.mark.parametrize("program", [RUN, DEMO])
def test_processes_of_ours_import_nothing_from_where_one_works(program: str, photos: Path, tmp_path: Path) -> None:
    """Where one works may be where the data are."""
    environment = prepare(tmp_path)
    work = tmp_path / "work"
    source = {"kind": "files", "url": str(photos), "include": "**/*.jpg"}
    stages = ["read", "decode", {"center_crop": {"size": 8}}, {"batch": {"size": 20}}]
    (work / "p.json").write_text(json.dumps({"source": source, "stages": stages}))
    command = [sys.executable, "-P", "-c", program]
    ran = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert "samples/s" in ran.stdout or "the training process failed" in ran.stderr, ran.stderr
    assert not (tmp_path / "called").exists(), (tmp_path / "called").read_text()
