"""What is there already at the destination: the plan of shards that were begun, the records of finished shards, the
manifest of all.

.loaderkit-shards/plan.json   first, with a token of the run that writes; while it is there, `kind: tar` refuses to read the
                              shards, since some may be missing
.loaderkit-shards/shard-*.json   the record of each shard, behind the shard
loaderkit-shards.json   the manifest, last: with it the shards are whole
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from loaderkit.connectors.base import Connector, writes_of
from loaderkit.errors import AccessDeniedError, ConfigError, LoaderkitError, ObjectNotFoundError
from loaderkit.shards.job import FOLDER, VERSION, ShardJob, ShardRecord, check_own, read_json, record_key, write_own
from loaderkit.shards.layout import SampleLayout
from loaderkit.sources.formats.tar_index import wds_index_key
from loaderkit.sources.tar.source import MANIFEST, UNFINISHED

assert UNFINISHED.startswith(FOLDER)


def check_fingerprint(found: Mapping[str, Any], fingerprint: Mapping[str, str], where: str, what: str) -> None:
    """Raise ConfigError unless the shards that are there belong to this job."""
    before: Mapping[str, str] = found.get("fingerprint", {})
    names = [name for name in {**before, **fingerprint} if before.get(name) != fingerprint.get(name)]
    if names:
        said = "; ".join(f"{name} was {before.get(name)!r} and is {fingerprint.get(name)!r}" for name in names[:3])
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"{where} holds {what} ({said}{more}): choose another --out, or remove what is there, {FOLDER} too"
        )


def planned(connector: Connector, job: ShardJob, fingerprint: Mapping[str, str]) -> ShardJob | None:
    """The job as it was planned when it was begun, or None if it was not begun. Raises ConfigError if another job was."""
    found = read_json(connector, UNFINISHED)
    if found is None:
        return None
    check_fingerprint(found, fingerprint, connector.describe(""), "unfinished shards of other data or settings")
    job = replace(job, bounds=np.array(found["bounds"], np.int64), layout=SampleLayout.of(found["layout"]))
    return replace(job, digest=_digest(_described(job, fingerprint)))


def begin(connector: Connector, job: ShardJob, fingerprint: Mapping[str, str]) -> ShardJob:
    """Remove what is left of another plan, and write this one; see `own`. Raises ConfigError if something else is where the
    shards would be."""
    if _exists(connector):
        ending = ".tar" if job.format == "tar" else ".npy"
        others = [info.key for info in connector.list("") if info.key.endswith(ending) and "/" not in info.key]
        if others:
            raise ConfigError(
                f"{connector.describe('')} is not empty: there is {others[0]!r}, which training would read for a shard, or "
                "which would be overwritten: choose another --out"
            )
        _empty(connector)
    return own(connector, job, fingerprint)


def own(connector: Connector, job: ShardJob, fingerprint: Mapping[str, str]) -> ShardJob:
    """Write the plan in the name of this run, then remove what is not committed, by runs that died or by a run that is
    at work: that run stops, and nothing that it still writes appears. Raises LoaderkitError if another one has begun
    just now."""
    plan = _described(job, fingerprint)
    job = replace(job, digest=_digest(plan), run=secrets.token_hex(8))
    writes_of(connector).put(UNFINISHED, json.dumps({"version": VERSION, "run": job.run, **plan}).encode())
    _clear_uncommitted(connector)
    check_own(connector, job)
    return job


def check_unfinished(connector: Connector) -> None:
    """Raise LoaderkitError, with this run's plan removed, if another run has finished since this one looked."""
    if read_json(connector, MANIFEST) is not None:
        clear(connector)
        raise LoaderkitError(
            f"another `loaderkit pack` has finished in {connector.describe('')} just now: run this again, and it compares "
            "what is there with what is wanted"
        )


def _described(job: ShardJob, fingerprint: Mapping[str, str]) -> dict[str, Any]:
    return {"fingerprint": dict(fingerprint), "bounds": job.bounds.tolist(), "layout": job.layout.to_dict()}


def _digest(plan: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=8).hexdigest()


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
        if record.plan == job.digest and (is_there or not record.num_samples):
            records[number] = record
    return records


def lost(connector: Connector, manifest: Mapping[str, Any]) -> list[str]:
    """The names of shards, or of the array, that the manifest has and that are missing, of another size, or without
    their index."""
    sizes = {info.key: info.size for info in connector.list("")}
    if manifest["format"] == "array":
        return [] if sizes.get(manifest["array"]) == manifest["num_bytes"] else [manifest["array"]]
    return [
        shard["name"]
        for shard in manifest["shards"]
        if sizes.get(shard["name"]) != shard["num_bytes"] or wds_index_key(shard["name"]) not in sizes
    ]


def finish(connector: Connector, manifest: Mapping[str, Any], job: ShardJob) -> None:
    """Write the manifest, then remove what is no longer needed. Raises LoaderkitError if not all is there as it was
    written, or another run has begun."""
    if job.format == "tar":
        names = {shard["name"] for shard in manifest["shards"]}
        there = [info.key for info in connector.list("") if info.key.endswith(".tar") and "/" not in info.key]
        if others := [key for key in there if key not in names]:
            raise LoaderkitError(
                f"{connector.describe(others[0])} is none of these shards, and training would read it: remove it, and run "
                "this again"
            )
    check_own(connector, job)
    if missing := lost(connector, manifest):
        raise LoaderkitError(
            f"{connector.describe(missing[0])} is no longer as it was written a while ago: another program has changed or "
            "removed it; run this again, and it is made anew"
        )
    write_own(connector, job, MANIFEST, json.dumps({"version": VERSION, **manifest}, indent=1).encode())
    _clear_uncommitted(connector)  # which makes all names durable
    clear(connector)


def clear(connector: Connector) -> None:
    """Remove the plan, the records and what writers that died have left."""
    writes_of(connector).delete(UNFINISHED)  # first: the manifest is there
    _empty(connector)
    _clear_uncommitted(connector)


def _empty(connector: Connector) -> None:
    """Remove the records, and the parts of an array."""
    writes = writes_of(connector)
    for key in [info.key for info in connector.list(FOLDER)]:
        writes.delete(key)


def _clear_uncommitted(connector: Connector) -> None:
    """Remove what writers have not committed, so that they no longer can."""
    with suppress(AccessDeniedError):  # to list unfinished uploads takes a permission of its own
        writes_of(connector).clear("", deep=False)
        writes_of(connector).clear(FOLDER)


def merged_extensions(records: Iterable[ShardRecord]) -> dict[str, list[str]]:
    """The extensions of every field's members in all shards."""
    merged: dict[str, set[str]] = {}
    for record in records:
        for field, extensions in record.extensions.items():
            merged.setdefault(field, set()).update(extensions)
    return {field: sorted(extensions) for field, extensions in merged.items()}
