"""The names that lie at a place: some of the first, without those of systems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.factory import open_connector, scheme_of
from loaderkit.errors import ConfigError, ObjectNotFoundError

_MOST_NAMES = 50_000  # 50 requests of a bucket, and 0.3 s of a local disk
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test")
_OF_SPLIT = re.compile(rf"({'|'.join(_SPLITS)})(?=[-_.])")
_SPLIT_NOTE = "only {}; there are others as well: {}"


@dataclass(frozen=True)
class DataPlace:
    """What was found: `url` is the folder, or of one file its URL, and keys lie below `connector`. `is_cut`: there are
    more."""

    url: str
    connector: Connector
    infos: tuple[ObjectInfo, ...]
    is_file: bool
    is_cut: bool

    def under(self, folder: str) -> str:
        """The URL of a folder of it, or of a file."""
        return self.url if self.is_file or not folder else f"{self.url.rstrip('/')}/{folder.rstrip('/')}"

    def info(self, key: str) -> ObjectInfo:
        """What was listed of a key."""
        return next(info for info in self.infos if info.key == key)

    def begin(self, key: str, most: int) -> bytes:
        """The first bytes of an object."""
        info = self.info(key)
        data = bytearray(min(info.size, most))
        self.connector.read_into(key, 0, memoryview(data), etag=info.etag)
        return bytes(data)


@contextmanager
def opened_place(url: str) -> Iterator[DataPlace]:
    """Raises ConfigError for a glob and for a place without files, and what the connector raises."""
    is_local = scheme_of(url) == "file"
    if re.search(r"[*?{]", url) and not (is_local and Path(url.removeprefix("file://")).exists()):
        raise ConfigError(f"{url}: give the folder, without a pattern; the pipeline's `include` says which files")
    folder, slash, name = url.rpartition("/")
    may_be_file = "." in name.strip(".") and not folder.endswith(":/")
    if is_local:
        may_be_file = Path(url.removeprefix("file://")).is_file()
    if may_be_file:
        with closing(open_connector(f"{folder}{slash}" or ".", {})) as connector:
            try:
                info = connector.stat(name)
            except ObjectNotFoundError:  # a folder with a dot in its name
                pass
            else:
                yield DataPlace(url, connector, (info,), is_file=True, is_cut=False)
                return
    with closing(open_connector(url, {})) as connector:
        infos = tuple(islice(connector.list(""), _MOST_NAMES + 1))
        if not infos:
            raise ConfigError(f"{url}: there is no file: name the folder, bucket or file that holds the data")
        yield DataPlace(url, connector, infos[:_MOST_NAMES], is_file=False, is_cut=len(infos) > _MOST_NAMES)


def common_folder(keys: list[str]) -> str:
    """The deepest folder that all keys lie in, with a slash at its end, or ""."""
    low, high = min(keys), max(keys)
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[: low.rfind("/", 0, same) + 1]


def without_other_splits(keys: list[str]) -> tuple[str, list[str], str, tuple[str, ...]]:
    """The folder in which all keys lie, the keys below it, what their names begin with, and what was left out, in words.

    Of folders, or of files, that are all called by splits only those of the training split are taken.
    """
    folder = common_folder(keys)
    names = [key[len(folder) :] for key in keys]
    of_folders = {name.partition("/")[0] for name in names if "/" in name}
    if len(of_folders) > 1 and of_folders <= {*_SPLITS} and all("/" in name for name in names):
        for split in _SPLITS[:2]:
            if split in of_folders:
                kept = [key for key in keys if key.startswith(f"{folder}{split}/")]
                inner, names, begin, _ = without_other_splits(kept)
                return inner, names, begin, (_SPLIT_NOTE.format(split, ", ".join(sorted(of_folders - {split}))),)
    matches = [_OF_SPLIT.match(name) for name in names]
    of_files = {match[1] if match else "" for match in matches}
    if "train" in of_files and len(of_files) > 1 and "" not in of_files and not of_folders:
        kept = [name for name in names if name.startswith("train")]
        return folder, kept, "train", (_SPLIT_NOTE.format("train", ", ".join(sorted(of_files - {"train"}))),)
    return folder, names, "", ()
