"""Finds the newest complete checkpoint below a prefix, for a job that its scheduler has restarted."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from loaderkit.checkpoint.discovery.locate import CheckpointLocation, locate
from loaderkit.checkpoint.discovery.manifest import NAME, Verify, read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")
_DIGITS = re.compile(r"(\d+)")


def latest(
    prefix: str | os.PathLike[str], *, verify: Verify = "auto", connectors: Mapping[str, Connector] | None = None
) -> str:
    """The URL of the newest complete checkpoint directly below `prefix`: "runs/a" holding "step-100/", "step-2000/".

    Newer is the larger number in the name ("step-2000" after "step-300"). A checkpoint is complete if its format says so,
    every file that it needs is there and long enough and, with a manifest, its sizes and its description are unchanged.
    Others are skipped with a warning that says why. Raises CheckpointError if none is left.
    """
    given = connectors or {}
    location = locate(prefix, given)
    try:
        names = _names(location)
    finally:
        location.close()
    skipped = []
    for name in sorted(names, key=_by_number, reverse=True):
        root = os.fspath(prefix)
        url = root + name if root.endswith("/") else f"{root}/{name}"
        try:
            inside = locate(url, given)
            try:
                fetch = fetch_of(inside.connector)
                read_manifest(inside, open_checkpoint(inside, fetch), verify, fetch)
            finally:
                inside.close()
        except (CheckpointError, FormatError, ConnectorError) as error:
            if not isinstance(error, CheckpointError) or "holds no checkpoint" not in str(error):
                logger.warning("%s is skipped: %s", printable(url), error)
                skipped.append(f"{name}: {error}")
        else:
            return url
    reasons = "\n  ".join(skipped[:5])
    raise CheckpointError(
        f"no complete checkpoint is below {os.fspath(prefix)!r}"
        + (
            f"; {len(skipped)} were skipped:\n  {reasons}"
            if skipped
            else f"; there are {', '.join(names[:3]) or 'no files'}"
        )
    )


def _names(location: CheckpointLocation) -> list[str]:
    """The files and folders directly below a location."""
    if location.single is not None:
        raise CheckpointError(f"{location.url} is a file: give the directory that the checkpoints are in")
    cut = len(location.prefix)
    names = dict.fromkeys(info.key[cut:].partition("/")[0] for info in location.connector.list(location.prefix))
    return [name for name in names if not name.endswith((NAME, ".tmp"))]  # .tmp: not renamed yet


def _by_number(name: str) -> list[Any]:
    """A sort key with numbers as numbers: "step-300" before "step-2000"."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in _DIGITS.split(name)]
