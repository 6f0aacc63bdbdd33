"""What is there already: the plan of shards that were begun, the records of those that are done, the manifest of all.

.loaderkit-shards/plan.json   first; while it is there, `kind: tar` refuses to read the shards, since some may be missing
.loaderkit-shards/shard-*.json   the record of each shard, behind the shard
loaderkit-shards.json   the manifest, last: with it the shards are whole
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from loaderkit.connectors.base import Connector, writes_of
from loaderkit.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from loaderkit.shards.job import FOLDER, ShardJob, ShardRecord, record_key
from loaderkit.shards.layout import Layout
from loaderkit.sources.formats.tar_index import wds_index_key
from loaderkit.sources.tar import UNFINISHED

MANIFEST = "loaderkit-shards.json"
_VERSION = 1
assert UNFINISHED.startswith(FOLDER)


def read_json(connector: Connector, key: str) -> dict[str, Any] | None:
    """An object that holds JSON; None if there is none. Raises FormatError."""
    try:
        info = connector.stat(key)
        data = bytearray(info.size)
        connector.read_into(key, 0, memoryview(data), etag=info.etag)
    except ObjectNotFoundError:
        return None
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            raise ValueError("it is of another version, or of another program")
    except ValueError as error:
        raise FormatError(f"{connector.describe(key)} is not what `loaderkit pack` has written: {error}") from None
    return values


def check_fingerprint(found: Mapping[str, Any], fingerprint: Mapping[str, str], where: str, what: str) -> None:
    """Raise ConfigError unless shards that are there are those of this job."""
    before: Mapping[str, str] = found.get("fingerprint", {})
    names = [name for name in {**before, **fingerprint} if before.get(name) != fingerprint.get(name)]
    if names:
        said = "; ".join(f"{name} was {before.get(name)!r} and is {fingerprint.get(name)!r}" for name in names[:3])
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(f"{where} holds {what} ({said}{more}): choose another --out, or remove what is there")


def planned(connector: Connector, job: ShardJob, fingerprint: Mapping[str, str]) -> ShardJob | None:
    """The job as it was planned when it was begun; None if it was not. Raises ConfigError if another one was."""
    found = read_json(connector, UNFINISHED)
    if found is None:
        return None
    check_fingerprint(found, fingerprint, connector.describe(""), "unfinished shards of other data or settings")
    return replace(job, bounds=np.array(found["bounds"], np.int64), layout=Layout.of(found["layout"]))


def begin(connector: Connector, job: ShardJob, fingerprint: Mapping[str, str]) -> None:
    """Write the plan. Raises ConfigError if something else is where the shards would be."""
    ending = ".tar" if job.format == "tar" else ".npy"
    others = [info.key for info in connector.list("") if info.key.endswith(ending)] if _exists(connector) else []
    if others:
        raise ConfigError(
            f"{connector.describe('')} is not empty: there is {others[0]!r}, which training would read for a shard, or which "
            "would be overwritten: choose another --out"
        )
    plan = {
        "version": _VERSION,
        "fingerprint": dict(fingerprint),
        "bounds": job.bounds.tolist(),
        "layout": job.layout.to_dict(),
    }
    writes_of(connector).put(UNFINISHED, json.dumps(plan).encode())


def _exists(connector: Connector) -> bool:
    try:
        next(iter(connector.list("")), None)
    except ObjectNotFoundError:  # a directory that is not made yet
        return False
    return True


def done(connector: Connector, job: ShardJob) -> dict[int, ShardRecord]:
    """The records of the shards that are there, by number."""
    sizes = {info.key: info.size for info in connector.list("")}
    records: dict[int, ShardRecord] = {}
    for number in range(job.num_shards):
        key = record_key(number)
        if key not in sizes:
            continue
        data = bytearray(sizes[key])
        connector.read_into(key, 0, memoryview(data))
        try:
            record = ShardRecord.of(bytes(data))
        except (ValueError, TypeError):
            continue  # it is made again
        is_there = sizes.get(record.name) == record.num_bytes
        if job.format == "tar":
            is_there = is_there and wds_index_key(record.name) in sizes
        if is_there or not record.num_samples:
            records[number] = record
    return records


def finish(connector: Connector, manifest: Mapping[str, Any], job: ShardJob) -> None:
    """Write the manifest, then remove what is needed no more."""
    data = json.dumps({"version": _VERSION, **manifest}, indent=1).encode()
    writes_of(connector).put(MANIFEST, data)
    clear(connector)


def clear(connector: Connector) -> None:
    """Remove the plan, the records and what writers that died have left."""
    writes = writes_of(connector)
    writes.delete(UNFINISHED)  # first: the manifest is there
    for key in [info.key for info in connector.list(FOLDER)]:
        writes.delete(key)
    clear_unfinished(connector)


def clear_unfinished(connector: Connector) -> None:
    """Remove what writers that died have left."""
    with suppress(AccessDeniedError):  # to list unfinished uploads takes a permission of its own
        writes_of(connector).clear("")


def merged_extensions(records: Iterable[ShardRecord]) -> dict[str, list[str]]:
    """Of all shards, the extensions of every field's members."""
    merged: dict[str, set[str]] = {}
    for record in records:
        for field, extensions in record.extensions.items():
            merged.setdefault(field, set()).update(extensions)
    return {field: sorted(extensions) for field, extensions in merged.items()}
