"""A directory whose power can be cut: what was not made durable by then is gone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from loaderkit.connectors.base import ObjectInfo, ObjectWriter, Writes
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.writing import WriterLayer, WritesLayer


class DroppingConnector(FileConnector):
    """The files below `root`. `durable`, beside it, holds a link to each file whose bytes and name would survive a power cut.

    Any number of processes may use the same two directories; `cut` is called when none does. What counts as durable is what
    POSIX promises: the bytes of a file after its commit, its name after `put`, `rename` or `sync`; a deletion after `sync`.
    """

    def __init__(self, root: str | Path, durable: str | Path) -> None:
        super().__init__(root)
        self.root = Path(root)
        self.durable = Path(durable)

    def writes(self) -> Writes:
        files = super().writes()
        assert files is not None
        return _DroppingWrites(files, self.root, self.durable)

    def cut(self, rng: random.Random | None = None) -> None:
        """Lose what is not durable. With `rng`: a part of it, as a file system may have written some names by itself."""
        now, then = _files(self.root), _files(self.durable)
        survivors = dict(then)
        if rng is not None:
            for name in sorted(now.keys() | then.keys()):
                if not name.endswith(".tmp") and rng.random() < 0.5:
                    survivors.pop(name, None)
                    if name in now:
                        survivors[name] = now[name]
        after = self.root.with_name(self.root.name + ".after")
        for name, path in survivors.items():
            _link(path, after / name)
        for directory in (self.root, self.durable):
            shutil.rmtree(directory, ignore_errors=True)
        for directory in (self.root, self.durable):
            for name in survivors:
                _link(after / name, directory / name)
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(after, ignore_errors=True)


class _DroppingWrites(WritesLayer):
    def __init__(self, inner: Writes, root: Path, durable: Path) -> None:
        super().__init__(inner)
        self._root, self._durable = root, durable

    def create(self, key: str, size: int) -> ObjectWriter:
        return WriterLayer(self.inner.create(key, size))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        info = self.inner.put(key, data)
        _link(self._root / key, self._durable / key)
        return info

    def rename(self, prefix: str, new_prefix: str) -> bool:
        if not self.inner.rename(prefix, new_prefix):
            return False
        old, new = self._durable / prefix, self._durable / new_prefix
        if old.is_dir():
            new.parent.mkdir(parents=True, exist_ok=True)
            if new.is_dir():  # what is durable of files deleted since
                shutil.rmtree(new)
            os.rename(old, new)
        return True

    def sync(self, prefix: str) -> None:
        self.inner.sync(prefix)
        now, then = _files(self._root / prefix), _files(self._durable / prefix)
        for name in then.keys() - now.keys():
            then[name].unlink()
        for name, path in now.items():
            if not name.endswith(".tmp"):
                _link(path, self._durable / prefix / name)


def _files(directory: Path) -> dict[str, Path]:
    """The files below a directory, by their POSIX path in it."""

    def walked() -> Iterator[Path]:
        for folder, _, names in os.walk(directory):
            yield from (Path(folder, name) for name in names)

    return {path.relative_to(directory).as_posix(): path for path in walked()}


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, which a commit replaces and never changes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    os.link(source, target)
