"""What a killed writer left goes with the next one; what another is still writing stays."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaderkit._internal.atomic_file import write_atomically
from loaderkit._internal.system.user_cache import keep
from loaderkit.cli import main
from loaderkit.cli.demo import photos


def in_cache(folder: Path) -> None:
    assert keep(folder / "index.npz", lambda file: file.write(b"whole"))


def report(folder: Path) -> None:
    write_atomically(folder / "report.json", "whole")


def index(folder: Path) -> None:
    (folder / "data.jsonl").write_text("1\n2\n")
    assert main(["index", str(folder / "data.jsonl")]) == 0


def demo(folder: Path) -> None:
    photos.demo_data(folder, 20)


WRITERS = {"in the cache": in_cache, "a report": report, "an index": index, "the demo's pictures": demo}


def begun(write: Callable[[Path], None], folder: Path, act: Callable[[], Any]) -> int:
    """The pid of a process that writes, and does something before it gives what it has written its name."""
    ready, told = os.pipe()
    if pid := os.fork():
        os.close(told)
        assert os.read(ready, 1)
        os.close(ready)
        return pid

    def renaming(by: Callable[[Any, Any], None]) -> Any:
        def rename(source: Any, target: Any) -> None:
            os.write(told, b"!")
            act()
            by(source, target)

        return rename

    os.replace, os.rename = renaming(os.replace), renaming(os.rename)
    code = 1
    try:
        write(folder)
        code = 0
    finally:
        os._exit(code)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", WRITERS)
def test_of_several_writers(
    name: str,
    tmp_path: Path,
    rng: random.Random,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(photos, "PHOTOGRAPHS", {})
    monkeypatch.setattr(photos, "_write_images", lambda train, *_: train.mkdir())
    write = WRITERS[name]
    goes_on, go = os.pipe()
    fates = [
        *rng.choices([True, False], k=2),
        False,
        True,
    ]  # the last one to begin is killed, and nobody has come since
    living: list[int] = []
    request.addfinalizer(lambda: kill(living))
    for dies in fates:
        if dies:
            pid = begun(write, tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        else:
            living.append(begun(write, tmp_path, lambda: os.read(goes_on, 1)))
    assert len([*tmp_path.glob("*.tmp")]) == len(living) + 1
    write(tmp_path)
    assert len([*tmp_path.glob("*.tmp")]) == len(living)
    os.write(go, b"!" * len(fates))
    while living:
        assert os.waitpid(living.pop(), 0)[1] == 0
    assert not [*tmp_path.glob("*.tmp")]
    os.close(goes_on)
    os.close(go)
    capfd.readouterr()
