"""`loaderkit index`: write, or verify, the `.idx` files beside local tar shards (DALI's wds2idx format, v1.2)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit.cli import console
from loaderkit.cli.options import AsJson, Debug
from loaderkit.errors import ConfigError, FormatError, LoaderkitError

if TYPE_CHECKING:
    from loaderkit.connectors.file import FileConnector
    from loaderkit.formats.tar_index import TarIndex
    from loaderkit.types import Member

_WORDS = {"missing": "there is no index", "stale": "the index does not fit the shard"}


def index(
    shards: Annotated[list[Path], typer.Argument(metavar="TAR...", help="Tar shards on this machine.")],
    verify: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if an index is missing or stale.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an index (.idx) beside each tar shard, so that nobody has to read all headers again."""
    _refuse_shared_names(shards)
    rows = []
    for shard in shards:
        row = _index_one(shard, verify)
        rows.append(row)
        if not as_json:
            _tell(row)
    num_failed = sum(row["status"] not in ("written", "ok") for row in rows)
    if as_json:
        total = sum(row["num_samples"] or 0 for row in rows)
        console.tell_json({"shards": rows, "num_samples": total, "num_failed": num_failed})
    if num_failed:
        raise typer.Exit(1)


def _refuse_shared_names(shards: list[Path]) -> None:
    """The format's rule cuts a name at its first dot, so two shards may claim one index."""
    owners: dict[Path, Path] = {}
    for shard in shards:
        other = owners.setdefault(_index_path(shard), shard)
        if other.absolute() != shard.absolute():
            raise ConfigError(
                f"{other} and {shard} would both have the index {_index_path(shard)}, since its name ends at their "
                "first dot: rename one of them"
            )


def _index_path(shard: Path) -> Path:
    from loaderkit.formats.tar_index import wds_index_key

    return shard.absolute().with_name(wds_index_key(shard.name))


def _index_one(shard: Path, verify: bool) -> dict[str, Any]:
    from loaderkit.connectors.file import FileConnector
    from loaderkit.formats.tar_index import scan_tar, write_wds_index

    row: dict[str, Any] = {"shard": str(shard), "index": str(_index_path(shard)), "status": "failed"}
    row |= {"num_samples": None, "num_members": None, "error": None}
    try:
        connector = FileConnector(shard.absolute().parent)
        members = scan_tar(connector, connector.stat(shard.name))
        text = write_wds_index(members)
        row["num_samples"] = text.count("\n") - 1  # a line for each, after the first
        row["num_members"] = len(_listed(members))
        key = _index_path(shard).name
        if verify:
            row["status"] = _verify(connector, key, members)
        else:
            connector.write(key, text.encode("utf-8", "surrogateescape"))  # a temporary name, then renamed
            row["status"] = "written"
    except (LoaderkitError, OSError) as error:
        row["error"] = str(error)
    return row


def _verify(connector: FileConnector, key: str, members: TarIndex) -> str:
    from loaderkit.errors import ObjectNotFoundError
    from loaderkit.formats.tar_index import parse_wds_index

    try:
        info = connector.stat(key)
    except ObjectNotFoundError:
        return "missing"
    data = bytearray(info.size)
    connector.read_into(key, 0, memoryview(data))
    try:
        found = parse_wds_index(data.decode("utf-8", "surrogateescape"), connector.describe(key))
    except FormatError:
        return "stale"
    # By what it says, not by its bytes: `wds2idx` also lists members that belong to no sample.
    return "ok" if found is not None and _listed(found) == _listed(members) else "stale"


def _listed(members: TarIndex) -> list[Member]:
    """The members that belong to a sample."""
    from loaderkit.formats.tar_index.index import sample_key_and_extension

    return [member for member in members if sample_key_and_extension(member.name) is not None]


def _tell(row: dict[str, Any]) -> None:
    if row["status"] in ("written", "ok"):
        counts = f"{row['num_samples']} samples, {row['num_members']} members"
        console.tell(f"{row['index']}: {row['status']}, {counts}")
    elif row["error"] is not None:
        named = "" if row["shard"] in row["error"] else f"{row['shard']}: "
        console.say(f"error: {named}{row['error']}")
    else:
        console.say(
            f"error: {row['shard']}: {_WORDS[row['status']]} ({row['index']}); write it with `loaderkit index {row['shard']}`"
        )
