"""Folders that may not be read: those of the system are left out, others are an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from loaderkit.connectors.file import FileConnector
from loaderkit.errors import AccessDeniedError


def test_folders_of_the_system_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the top of a disk."""
    for name in ("a/1", "a/lost+found/2", "lost+found/3", ".Trash-0/4", "lost/5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    denied, scan = {"lost+found", ".Trash-0"}, os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name in denied:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    connector = FileConnector(tmp_path)
    assert [info.key for info in connector.list("")] == ["a/1", "lost/5"]
    for prefix in ("lost+found/", ".Trash-0/4"):
        with pytest.raises(AccessDeniedError):
            list(connector.list(prefix))
    denied.add("lost")
    with pytest.raises(AccessDeniedError, match="lost/"):
        list(connector.list(""))
