"""Warnings name a line of the user's, never one of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderkit.connectors.file import FileConnector
from loaderkit.sources.serial.lines import LinesArgs, LinesSource


def test_where_a_warning_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that lead nowhere are found in the caller's thread, an index that is not used in one of the package's."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").symlink_to("nothing")
    (tmp_path / "a.txt.offsets").write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="lead nowhere|is not used") as caught:
        LinesSource(FileConnector(tmp_path), LinesArgs(url=str(tmp_path), format="text"))
    nowhere, unused = sorted(caught, key=lambda one: "is not used" in str(one.message))
    assert "lead nowhere" in str(nowhere.message)
    assert nowhere.filename == __file__
    assert "is not used" in str(unused.message)
    assert "loaderkit" not in unused.filename
