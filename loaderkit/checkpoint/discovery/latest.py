"""Finds the newest complete checkpoint below a prefix, for a job that its scheduler has restarted."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from loaderkit.checkpoint.discovery.listing import by_number, names_below, url_below
from loaderkit.checkpoint.discovery.locate import SAVING, locate
from loaderkit.checkpoint.discovery.manifest import Verify, read_manifest
from loaderkit.checkpoint.discovery.open import NoCheckpointError, open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")


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
        names = [name for name in names_below(location) if not name.startswith(SAVING)]
    finally:
        location.close()
    skipped = []
    for name in sorted(names, key=by_number, reverse=True):
        url = url_below(prefix, name)
        try:
            inside = locate(url, given)
            try:
                fetch = fetch_of(inside.connector)
                read_manifest(inside, open_checkpoint(inside, fetch), verify, fetch)
            finally:
                inside.close()
        except NoCheckpointError:
            continue
        except (CheckpointError, FormatError, ConnectorError) as error:
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
