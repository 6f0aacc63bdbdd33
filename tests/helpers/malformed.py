"""Malformed and hostile checkpoints, and the check that both ways to restore refuse them."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import LoaderkitError


def refused(data: bytes, match: str, name: str = "x.safetensors") -> None:
    """Both ways refuse it: into new tensors, and into given ones, which stay as they are."""
    connectors = {"memory": MemoryConnector({name: data})}
    target = torch.full((2,), 3.0)
    for into in (None, {"a": target}):
        with pytest.raises(LoaderkitError, match=match) as caught:
            loaderkit.restore(f"memory://{name}", into, connectors=connectors)
        assert name in str(caught.value)
    assert target.tolist() == [3, 3]


class Evil:
    """Pickled, it calls something when it is unpickled the usual way."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


# [x, x] of the last, again and again: its text would have 2**60 letters
LISTS = b"]q\0" + b"".join(b"0(h%ch%clq%c" % (n, n, n + 1) for n in range(60))


def archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A zip as torch.save makes it, with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("x/data.pkl", pickled)
        for name, data in (records or {}).items():
            writer.writestr(f"x/{name}", data)
    return file.getvalue()


def archive_pickle(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
