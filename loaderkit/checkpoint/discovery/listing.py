"""Lists the checkpoints below a prefix: of each its step, age and size, and whether it is whole or what is missing."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from loaderkit.checkpoint.discovery.by_manifest import objects_by_manifest
from loaderkit.checkpoint.discovery.detect import NoCheckpointError
from loaderkit.checkpoint.discovery.kinds import SHARD, is_description, step_in
from loaderkit.checkpoint.discovery.locate import SAVING, CheckpointLocation, locate
from loaderkit.checkpoint.discovery.manifest import NAME, manifest_key, needed_objects, read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector, ObjectInfo, modified_s_of, traits_of
from loaderkit.errors import STORE_FAILURES, CheckpointError, ConnectorError, FormatError, printable

_NUM_AT_ONCE = 8  # checkpoints opened at the same time in a store that one waits for
_MAX_ASKED = 32  # files whose times are asked for; the others were written at about the same time
_MARKERS = (".json", ".new")  # end the names of what lies beside directories that are being written
_UNFINISHED = "not committed: it is being written, or was left behind by a save that died"
_BEST, _UNNUMBERED, _NUMBERED, _STEPS = range(4)  # of names, by age
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint, or what is left of one.

    `problem` is "" for a whole one, else what is missing or wrong. `num_bytes` and `num_files` count the files that belong to
    it; for one that is not whole they count all files that are there. `time_s` is when it was committed, in seconds
    since 1970 by the clock of the store; None where the store does not say.
    """

    name: str
    url: str
    step: int | None
    time_s: float | None
    num_bytes: int
    num_files: int
    format: str = ""
    has_manifest: bool = False
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.problem


def by_age(name: str, time_s: float | None = None) -> tuple[Any, ...]:
    """A sort key by which the newest comes last.

    The names of the best, which may be of any step, come first; then those without a number, with numbers ("epoch-9" before
    "epoch-10"), and with a step ("step-300" before "step-2000"). Names that are equal by then are ordered by `time_s`,
    when they were written.
    """
    parts = [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in _DIGITS.split(name)]
    kind, step = _age(name)
    return kind, step, parts if kind == _NUMBERED else [], time_s or 0.0, parts


def _age(name: str) -> tuple[int, int]:
    """The part of `by_age` that comes from the step, or from its absence."""
    step = step_in(name)
    if step is not None:
        return _STEPS, step
    return (_BEST if "best" in name.lower() else _NUMBERED if _DIGITS.search(name) else _UNNUMBERED), 0


def candidates_below(location: CheckpointLocation) -> list[str]:
    """The names below a location that may be checkpoints, the newest first; "" for the location itself, if it has a description
    or shards and no name has a step. Raises CheckpointError for a file."""
    below = names_below(location)
    if any(map(_is_part, below)) and not any(step_in(name) is not None for name in below):
        return [""]
    ages = Counter(map(_age, below))

    def age(name: str) -> tuple[Any, ...]:
        is_told = ages[_age(name)] == 1 or _age(name)[0] == _NUMBERED
        keys = [info.key for info in below[name][-_MAX_ASKED:]]
        return by_age(name, None if is_told else newest_s(location.connector, keys))

    names = [name for name in below if not name.startswith(SAVING) and not _is_part(name)]
    return sorted(names, key=age, reverse=True)


def _is_part(name: str) -> bool:
    """True for a file that is the description, or a shard, of the checkpoint in whose directory it is."""
    return is_description(name) or SHARD.fullmatch(name) is not None


def names_below(location: CheckpointLocation) -> dict[str, list[ObjectInfo]]:
    """Name -> its objects, for the files and directories directly below a location; without manifests and temporary files.

    Raises CheckpointError for a file.
    """
    if location.single is not None or location.named:
        raise CheckpointError(f"{location.url} is a file: give the directory that the checkpoints are in")
    cut = len(location.prefix)
    names: dict[str, list[ObjectInfo]] = {}
    for info in location.connector.list(location.prefix):
        names.setdefault(info.key[cut:].partition("/")[0], []).append(info)
    return {name: infos for name, infos in names.items() if not name.endswith((NAME, ".tmp"))}


def url_below(prefix: str | os.PathLike[str], name: str) -> str:
    """The URL of a name below a prefix."""
    root = os.fspath(prefix)
    return root + name if root.endswith("/") else f"{root}/{name}"


def list_checkpoints(
    url: str | os.PathLike[str], connectors: Mapping[str, Connector] | None = None
) -> list[CheckpointSummary]:
    """The checkpoints directly below `url`, the newest last, in the order of `latest`; or the one that `url` itself is.

    A directory holds checkpoints if a name in it has a step ("step-100", "checkpoint-100.pt"), or if it is no
    checkpoint itself. What is being written, or was left half-written, is listed with its problem; other files are left
    out. Raises CheckpointError if nothing is there, and ConnectorError if the store cannot be reached.
    """
    given, root = connectors or {}, os.fspath(url)
    location = locate(url, given)
    try:
        if location.single is not None or location.named:
            return _present([_summary(root, given)])
        names = names_below(location)
        if not any(step_in(name) is not None or name.startswith(SAVING) for name in names):
            itself = _summary(root, given)
            if itself is not None:
                return [itself]

        def summary_of(name: str) -> CheckpointSummary | None:
            if name.startswith(SAVING):
                if name.endswith(_MARKERS):
                    return None
                return _broken(location.connector, url_below(root, name), names[name], _UNFINISHED)
            try:
                return _by_manifest(location, root, name, names[name]) or _summary(url_below(root, name), given)
            except STORE_FAILURES:
                raise
            except (CheckpointError, FormatError, ConnectorError) as error:  # a damaged archive, or it was just removed
                return _broken(location.connector, url_below(root, name), [], str(error))

        at_once = _NUM_AT_ONCE if traits_of(location.connector).is_remote else 1
        with ThreadPoolExecutor(at_once, thread_name_prefix="loaderkit-list") as pool:
            try:
                summaries = _present(pool.map(summary_of, sorted(names)))
                return sorted(summaries, key=lambda summary: by_age(summary.name, summary.time_s))
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        location.close()


def _present(summaries: Iterable[CheckpointSummary | None]) -> list[CheckpointSummary]:
    return [summary for summary in summaries if summary is not None]


def _by_manifest(
    location: CheckpointLocation, root: str, name: str, infos: list[ObjectInfo]
) -> CheckpointSummary | None:
    """The summary of a checkpoint from its manifest; None where its description has to be read."""
    prefix = f"{location.prefix}{name}/"
    found = objects_by_manifest({info.key.removeprefix(prefix): info for info in infos}, fetch_of(location.connector))
    if found is None:
        return None
    description, belonging = found
    return CheckpointSummary(
        name=name,
        url=url_below(root, name),
        step=step_in(name),
        time_s=newest_s(location.connector, [prefix + NAME]),
        num_bytes=sum(info.size for info in belonging),
        num_files=len(belonging),
        format=description.format,
        has_manifest=True,
    )


def _summary(url: str, given: Mapping[str, Connector]) -> CheckpointSummary | None:
    """The summary of a checkpoint, or None for what is no checkpoint. Raises CheckpointError if nothing is there."""
    location = locate(url, given)
    try:
        fetch = fetch_of(location.connector)
        checkpoint = open_checkpoint(location, fetch)
        location = location.of(checkpoint)
        checksums = read_manifest(location, checkpoint, "auto", fetch)
    except NoCheckpointError:
        return None
    except STORE_FAILURES:
        raise
    except (CheckpointError, FormatError, ConnectorError) as error:
        return _broken(location.connector, url, [*location.objects()], str(error))
    else:
        infos = needed_objects(checkpoint)
        asked = [manifest_key(location)] if checksums else [info.key for info in infos[-_MAX_ASKED:]]
        return CheckpointSummary(
            name=_name_in(url),
            url=url,
            step=step_in(_name_in(url)),
            time_s=newest_s(location.connector, asked),
            num_bytes=sum(info.size for info in infos),
            num_files=len(infos),
            format=checkpoint.format,
            has_manifest=bool(checksums),
        )
    finally:
        location.close()


def _broken(connector: Connector, url: str, infos: list[ObjectInfo], problem: str) -> CheckpointSummary:
    """The summary of a checkpoint that is not whole; all of its files count."""
    return CheckpointSummary(
        name=_name_in(url),
        url=url,
        step=step_in(_name_in(url)),
        time_s=newest_s(connector, [info.key for info in infos]),
        num_bytes=sum(info.size for info in infos),
        num_files=len(infos),
        has_manifest=any(info.key.endswith(NAME) for info in infos),
        problem=problem.removeprefix(f"{printable(url)} is ").removeprefix(f"{printable(url)} "),
    )


def _name_in(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def newest_s(connector: Connector, keys: Iterable[str]) -> float | None:
    """When the last of some objects was written; None where the store does not say, or one of them is gone."""
    times = []
    for key in keys:
        try:
            times.append(modified_s_of(connector, key))
        except ConnectorError:
            return None
    known = [time_s for time_s in times if time_s is not None]
    return max(known, default=None) if len(known) == len(times) else None
