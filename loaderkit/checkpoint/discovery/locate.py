"""From a URL to a connector and the objects below it: a directory, one file, or either of them inside a tar."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from loaderkit._internal.config.paths import absolute_path
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.discovery.archive import TarConnector
from loaderkit.checkpoint.discovery.kinds import HEAD_BYTES, USUAL_SUFFIXES, is_description, kind_of
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.factory import open_connector
from loaderkit.errors import CheckpointError, ObjectNotFoundError
from loaderkit.sources.formats.tar_index import load_index

SAVING = ".saving-"
"""Begins the name of a directory that is being written, and the name of a file beside it that says which process writes
it."""
STARTING = ".starting-"
"""Begins the name of a file that says that a program begins with what it has restored."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class NothingThereError(CheckpointError):
    """There is nothing where a checkpoint is looked for."""


class CheckpointLocation(NamedTuple):
    """Where a checkpoint is: its one object `single`, or else the directory `prefix` ("" or "name/"). The file `named`
    in the directory says which files belong to it; with "" that is still to be found out."""

    url: str
    connector: Connector
    prefix: str
    single: ObjectInfo | None
    owned: bool  # True: `close` closes the connector
    named: str = ""

    def close(self) -> None:
        """Close the connector, unless it was given."""
        if self.owned:
            self.connector.close()

    def of(self, checkpoint: Checkpoint) -> CheckpointLocation:
        """The location of a checkpoint that was opened here, since a file may have named a folder below."""
        return self._replace(url=checkpoint.name, prefix=checkpoint.prefix)

    def objects(self) -> Iterator[ObjectInfo]:
        """The objects in the directory and below it; or the one object."""
        return iter([self.single]) if self.single is not None else self.connector.list(self.prefix)


def locate(url: str | os.PathLike[str], connectors: Mapping[str, Connector]) -> CheckpointLocation:
    """The location that a URL or path names. Raises CheckpointError if nothing is there, and what the connector raises."""
    url = os.fspath(url)
    root, key, given = _split(url, connectors)
    connector = given if given is not None else open_connector(root, connectors)
    try:
        return _find(url, connector, key, given is None)
    except BaseException:
        if given is None:
            connector.close()
        raise


def _split(url: str, connectors: Mapping[str, Connector]) -> tuple[str, str, Connector | None]:
    """(the connector's root, the key in it, the connector if it is given). The root of a tar's members is the tar's folder."""
    match = _URL.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", url)
    if scheme in connectors:
        return url, rest.strip("/"), connectors[scheme]
    if scheme == "file":
        rest = absolute_path(os.path.expanduser(rest))
    parts = rest.rstrip("/").split("/")
    cut = next((n for n, part in enumerate(parts) if part.endswith(".tar")), len(parts) - 1)
    if scheme == "file" and os.path.isdir("/".join(parts[: cut + 1])):
        cut = len(parts) - 1  # a directory may be called "x.tar", too
    if cut == 0:  # a bucket without a prefix, or the root directory
        return (rest or "/") if scheme == "file" else url, "", None
    root = "/".join(parts[:cut]) or "/"
    return root if scheme == "file" else f"{scheme}://{root}", "/".join(parts[cut:]), None


def _find(url: str, connector: Connector, key: str, owned: bool) -> CheckpointLocation:
    info = _stat(connector, key) if key else None
    if info is not None and not _is_archive(connector, info):
        return _of_file(url, connector, info, owned)
    cut = _archive_in(connector, key) if info is None else len(key)
    if cut:
        archives = TarConnector(connector, partial(_members, connector), key[:cut])
        inside = _stat(archives, key) if cut < len(key) else None
        if inside is not None:
            return _of_file(url, archives, inside, owned)
        prefix = key.rstrip("/") + "/"
        if next(iter(archives.list(prefix)), None) is None:
            raise CheckpointError(f"{url}: nothing of this name is in the archive {connector.describe(key[:cut])}")
        return CheckpointLocation(url, archives, _descend(archives, prefix), None, owned)
    prefix = f"{key}/" if key else ""
    try:
        first = next(iter(connector.list(prefix)), None)
    except ObjectNotFoundError:
        first = None
    if first is None:
        raise NothingThereError(f"{url}: there is no such file, and no directory with files; check the path")
    return CheckpointLocation(url, connector, prefix, None, owned)


def _of_file(url: str, connector: Connector, info: ObjectInfo, owned: bool) -> CheckpointLocation:
    """The location of a file, or its directory if the file says what belongs to a checkpoint."""
    folder, slash, name = info.key.rpartition("/")
    if is_description(name):
        return CheckpointLocation(url, connector, folder + slash, None, owned, name)
    return CheckpointLocation(url, connector, "", info, owned)


def _is_archive(connector: Connector, info: ObjectInfo) -> bool:
    """True for a tar: torch.save is often told to write "model.pth.tar", and NeMo's tars are called "model.nemo"."""
    if info.key.endswith(USUAL_SUFFIXES):
        return False
    head = bytearray(min(info.size, HEAD_BYTES))
    connector.read_into(info.key, 0, memoryview(head), etag=info.etag)
    kind = kind_of(bytes(head), info.size)
    return kind == "tar" or (kind is None and info.key.endswith(".tar"))


class SaveTarget(NamedTuple):
    """Where a checkpoint is to be: the directory `name` in the directory `parent` ("" or "name/") of a store."""

    url: str
    connector: Connector
    parent: str
    name: str  # "": it is the whole store
    owned: bool  # True: `close` closes the connector

    @property
    def prefix(self) -> str:
        """The prefix of the keys of its objects."""
        return f"{self.parent}{self.name}/" if self.name else self.parent

    def close(self) -> None:
        """Close the connector, unless it was given."""
        if self.owned:
            self.connector.close()


def save_target(url: str | os.PathLike[str], connectors: Mapping[str, Connector]) -> SaveTarget:
    """The directory that a URL or path names, which need not exist. Raises CheckpointError for one inside an archive, and what
    the connector raises."""
    url = os.fspath(url)
    root, key, given = _split(url, connectors)
    if ".tar/" in key:
        raise CheckpointError(f"{url}: nothing can be saved inside an archive; save to a directory")
    parent, slash, name = key.rpartition("/")
    connector = given if given is not None else open_connector(root, connectors)
    return SaveTarget(url, connector, parent + slash, name, given is None)


def _members(connector: Connector, info: ObjectInfo) -> list:  # type: ignore[type-arg]
    return load_index(connector, info, default_cache_dir(), use_wds_index=False).members()


def _descend(archives: TarConnector, prefix: str) -> str:
    """The folder of all members of an archive: `tar -c step-100` puts all under "step-100/"."""
    names = {info.key[len(prefix) :].rpartition("/")[0] for info in archives.list(prefix)}
    folders = [name.split("/") for name in names]
    levels = zip(min(folders), max(folders), strict=False)  # all names share what the first and the last share
    common = "/".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], levels))
    return f"{prefix}{common}/" if common else prefix


def _archive_in(connector: Connector, key: str) -> int:
    """The end, in `key`, of the name of the archive that it leads into; 0 if it leads into none."""
    cut = key.find(".tar/")
    while cut >= 0:
        if _stat(connector, key[: cut + 4]) is not None:
            return cut + 4
        cut = key.find(".tar/", cut + 1)
    return 0


def _stat(connector: Connector, key: str) -> ObjectInfo | None:
    try:
        return connector.stat(key)
    except ObjectNotFoundError:
        return None
