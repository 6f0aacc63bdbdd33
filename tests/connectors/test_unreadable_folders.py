"""Folders that may not be read: those of the system are left out, others are an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loaderkit._internal.kept import folder_marks
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import AccessDeniedError
from loaderkit.sources.files.source import FilesArgs, FilesSource


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of folders that may not be read."""
    denied: set[str] = set()
    scan, mark = os.scandir, folder_marks._mark

    def checked(path: str) -> str:
        if Path(path).name in denied:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return path

    monkeypatch.setattr(os, "scandir", lambda path: scan(checked(path)))
    monkeypatch.setattr(folder_marks, "_mark", lambda path: mark(checked(path)))
    return denied


def test_folders_of_the_system_that_may_not_be_read(tmp_path: Path, denied: set[str]) -> None:
    """As at the top of a disk."""
    for name in ("a/1", "a/lost+found/2", "lost+found/3", ".Trash-0/4", "lost/5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    denied |= {"lost+found", ".Trash-0"}
    connector = FileConnector(tmp_path)
    assert [info.key for info in connector.list("")] == ["a/1", "lost/5"]
    for prefix in ("lost+found/", ".Trash-0/4"):
        with pytest.raises(AccessDeniedError):
            list(connector.list(prefix))
    denied.add("lost")
    with pytest.raises(AccessDeniedError, match="lost/"):
        list(connector.list(""))


def test_a_listing_is_kept_beside_them(tmp_path: Path, denied: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_marks, "file_system_of", lambda path, mounts: "ext4")
    monkeypatch.setattr("loaderkit._internal.kept.folder_marks.time.time", lambda: 4e9)
    for name in ("disk/a/1.txt", "disk/lost+found/2.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x")
    denied.add("lost+found")
    args = FilesArgs.model_validate({"url": str(tmp_path / "disk"), "listing": "keep"})
    for _ in range(2):
        assert FilesSource(FileConnector(tmp_path / "disk"), args).key(0) == "a/1.txt"
        assert [*(tmp_path / "cache" / "listings").iterdir()]
    with pytest.raises(PermissionError):
        folder_marks.FolderMarks.take(str(tmp_path / "disk" / "lost+found"))
