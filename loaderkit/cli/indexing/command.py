"""`loaderkit index`: write, or verify, indexes beside tar shards (wds2idx, v1.2), files of lines and TFRecords."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from loaderkit._internal.temporary_files import remove_leftovers
from loaderkit.cli.indexing.lengths import index_lengths
from loaderkit.cli.indexing.serial import has_lines, has_records, index_key, indexed
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import AsJson, Debug
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, ObjectNotFoundError, SourceError

if TYPE_CHECKING:
    from loaderkit.connectors.base import Connector
    from loaderkit.sources.formats.tar_index import TarIndex
    from loaderkit.sources.formats.tar_index.index import Member

_WORDS = {"missing": "there is no index", "stale": "the index does not fit the shard"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://.*/)([^/]*)", re.DOTALL)
_NUM_AT_ONCE = 8  # of a store that one waits for


class _Shard(NamedTuple):
    """One shard: the name by which it was given, the connector that holds it, and the keys of the shard and its index
    there."""

    name: str
    connector: Connector
    key: str
    index_key: str
    shown_index: str


def index(
    shards: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help="Tar shards, lines (.jsonl, .ndjson, .json, .txt) or TFRecords: paths, folders of shards, or URLs such as "
            "s3://bucket/shards/*.tar, with globs.",
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="P",
            help="Instead: measure the samples of a pipeline with `pack`, or `tokens` in `batch`, and keep their lengths.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if an index is missing or stale.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an index beside each tar shard or TFRecord file (.idx) or file of lines (.offsets): it tells where samples lie."""
    if lengths is not None:
        if shards or verify:
            raise ConfigError("--lengths stands alone, without FILE and --check")
        index_lengths(lengths, as_json)
        return
    if not shards:
        raise ConfigError("Missing argument 'FILE...': name files, or a pipeline behind --lengths")
    rows = []
    with ExitStack() as stack:
        opened = _found(shards, stack)
        _refuse_shared_names(opened)
        if not verify:
            _remove_leftovers(opened)
        for row in _indexed(opened, verify):
            rows.append(row)
            if not as_json:
                _tell(row)
    num_failed = sum(row["status"] not in ("written", "ok") for row in rows)
    if as_json:
        total = sum(row["num_samples"] or 0 for row in rows)
        console.tell_json({"shards": rows, "num_samples": total, "num_failed": num_failed})
    if num_failed:
        raise typer.Exit(1)


def _found(names: list[str], stack: ExitStack) -> list[_Shard]:
    """The shards that the arguments name. Each folder of a store has one connector, which is closed with `stack`."""
    from loaderkit.connectors.factory import open_connector
    from loaderkit.connectors.file import FileConnector

    found: list[_Shard] = []
    opened: dict[str, Connector] = {}
    for name in chain.from_iterable(map(_in_folder, names)):
        match = _URL.match(name)
        if match is None:
            path = Path(name).absolute()
            index_path = path.with_name(_index_key(path.name))
            found.append(_Shard(name, FileConnector(path.parent), path.name, index_path.name, str(index_path)))
            continue
        folder, pattern = match.groups()
        if folder not in opened:
            opened[folder] = stack.enter_context(closing(open_connector(folder, {})))
        connector = opened[folder]
        for key in _keys(connector, folder, pattern):
            index_key = _index_key(key)
            found.append(_Shard(connector.describe(key), connector, key, index_key, connector.describe(index_key)))
    return list({shard.name: shard for shard in found}.values())


def _index_key(key: str) -> str:
    from loaderkit.sources.formats.tar_index import wds_index_key

    return index_key(key) or wds_index_key(key)


def _in_folder(name: str) -> list[str]:
    """The archives that `kind: tar` reads from a folder; for a folder of a store, the URL with their pattern."""
    match = _URL.match(name)
    if match is not None:
        # A name without a dot or a glob is no archive's.
        return [f"{name.rstrip('/')}/*.tar"] if re.fullmatch(r"[^.*?[{]*", match[2]) else [name]
    if not Path(name).is_dir():
        return [name]
    from loaderkit.connectors.file import FileConnector

    return [str(Path(name, key)) for key in _keys(FileConnector(name), f"{name}/", "*.tar")]


def _keys(connector: Connector, folder: str, pattern: str) -> list[str]:
    """The keys that a name with globs and braces matches; a shell expands these for paths only."""
    from loaderkit.sources.patterns import Patterns

    patterns = Patterns(pattern)
    if patterns.names is not None:
        return patterns.names
    keys = [info.key for info in connector.list(patterns.prefix) if patterns.matches(info.key)]
    if not keys:
        raise SourceError(f"{folder}{pattern}: there is nothing that is called so")
    return keys


def _refuse_shared_names(shards: list[_Shard]) -> None:
    """The format's rule cuts a name at its first dot, so two shards may claim one index."""
    owners: dict[str, _Shard] = {}
    for shard in shards:
        other = owners.setdefault(shard.shown_index, shard)
        if other.key != shard.key:
            raise ConfigError(
                f"{other.name} and {shard.name} would both have the index {shard.shown_index}, since its name ends at their "
                "first dot: rename one of them"
            )


def _remove_leftovers(shards: list[_Shard]) -> None:
    """Remove what a killed run has left beside files of this machine."""
    from loaderkit.connectors.file_writes import TEMPORARY_NAME

    for folder in {os.path.dirname(shard.shown_index) for shard in shards}:
        remove_leftovers(folder, TEMPORARY_NAME)  # a store's is none of this machine's folders


def _indexed(shards: list[_Shard], verify: bool) -> Iterator[dict[str, Any]]:
    from loaderkit.connectors.base import traits_of

    is_remote = any(traits_of(shard.connector).is_remote for shard in shards)
    with ThreadPoolExecutor(_NUM_AT_ONCE if is_remote else 1, thread_name_prefix="loaderkit-index") as pool:
        try:
            yield from pool.map(lambda shard: _index_one(shard, verify), shards)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C is not to wait for all the others


def _index_one(shard: _Shard, verify: bool) -> dict[str, Any]:
    from loaderkit.connectors.base import writes_of
    from loaderkit.sources.formats.tar_index import scan_tar, write_wds_index

    row: dict[str, Any] = {"shard": shard.name, "index": shard.shown_index, "status": "failed"}
    row |= {"num_samples": None, "num_members": None, "error": None}
    connector = shard.connector
    try:
        if index_key(shard.key) is not None:
            return row | _index_serial(shard, verify)
        members = scan_tar(connector, connector.stat(shard.key))
        text = write_wds_index(members)
        row["num_samples"] = text.count("\n") - 1  # a line for each, after the first
        row["num_members"] = len(_listed(members))
        if verify:
            row["status"] = _verify(connector, shard.index_key, members)
        else:
            writes_of(connector).put(shard.index_key, text.encode("utf-8", "surrogateescape"))
            row["status"] = "written"
    except (LoaderkitError, OSError) as error:
        row["error"] = str(error)
    return row


def _index_serial(shard: _Shard, verify: bool) -> dict[str, Any]:
    from loaderkit.connectors.base import writes_of

    found = indexed(shard.connector, shard.connector.stat(shard.key))
    status = "written"
    if verify:
        status = {True: "ok", False: "stale", None: "missing"}[found.is_right()]
    else:
        writes_of(shard.connector).put(shard.index_key, found.data)
    return {"status": status, "num_samples": found.num_samples, "num_members": found.num_items}


def _verify(connector: Connector, key: str, members: TarIndex) -> str:
    from loaderkit.sources.formats.tar_index import parse_wds_index

    try:
        info = connector.stat(key)
    except ObjectNotFoundError:
        return "missing"
    data = bytearray(info.size)
    connector.read_into(key, 0, memoryview(data))
    try:
        listed = parse_wds_index(data.decode("utf-8", "surrogateescape"), connector.describe(key))
    except FormatError:
        return "stale"
    # By what it says, not by its bytes: `wds2idx` also lists members that belong to no sample.
    return "ok" if listed is not None and _listed(listed) == _listed(members) else "stale"


def _listed(members: TarIndex) -> list[Member]:
    """The members that belong to a sample."""
    from loaderkit.sources.formats.tar_index.index import sample_key_and_extension

    return [member for member in members if sample_key_and_extension(member.name) is not None]


def _tell(row: dict[str, Any]) -> None:
    if row["status"] in ("written", "ok"):
        what = "lines" if has_lines(row["shard"]) else "records" if has_records(row["shard"]) else "members"
        counts = f"{row['num_samples']} samples, {row['num_members']} {what}"
        console.tell(f"{row['index']}: {row['status']}, {counts}")
    elif row["error"] is not None:
        named = "" if row["shard"] in row["error"] else f"{row['shard']}: "
        console.say(f"error: {named}{row['error']}")
    else:
        console.say(
            f"error: {row['shard']}: {_WORDS[row['status']]} ({row['index']}); write it with `loaderkit index {row['shard']}`"
        )
