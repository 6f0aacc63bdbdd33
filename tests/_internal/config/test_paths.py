"""Absolute paths lead where the system would go."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import loaderkit
from loaderkit._internal.config.paths import absolute_path


def test_they_lead_where_the_system_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    for name in ("a/b", "a/c", "b/c", "c"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for link, to in (("a/l", "../b/c"), ("b/l", "../a"), ("c/l", "../l"), ("l", "b/c")):
        (tmp_path / link).symlink_to(to)
    monkeypatch.chdir(tmp_path)
    num_existing = 0
    for _ in range(500):
        path = "/".join(rng.choices(["a", "b", "c", "l", "..", ".", ""], k=rng.randint(1, 6))).lstrip("/") or "."
        found = absolute_path(path)
        assert os.path.isabs(found)
        assert ".." not in found.split("/")
        if os.path.exists(path):
            num_existing += 1
            assert os.path.samefile(found, path), path
    assert num_existing > 50


def test_without_such_a_link_only_the_text_is_changed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert absolute_path(f"{tmp_path}/x/../link//./y/") == f"{tmp_path}/link/y"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_source_behind_a_link(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "disk" / "train").mkdir(parents=True)
    (tmp_path / "current").symlink_to("disk/train")
    for folder, text in (("disk/val", "right"), ("val", "wrong")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    source = {"kind": "files", "url": f"{scheme}{tmp_path}/current/../val"}
    with loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 1}}]}) as loader:
        assert [batch["txt"] for batch in loader] == [[b"right"]]
