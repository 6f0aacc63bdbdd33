"""Restores from a checkpoint that a running job may delete meanwhile, as `keep` of its manager says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from loaderkit.checkpoint.discovery.latest import check_whole, is_there, latest, prefix_of
from loaderkit.checkpoint.discovery.locate import NothingThereError
from loaderkit.connectors.base import Connector
from loaderkit.errors import STORE_FAILURES, CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")
Url = str | os.PathLike[str]
_MAX_REMOVED = 10  # checkpoints that are removed one after the other while they are read


def restore_next(
    restore: Callable[[Url], Any], url: Url, error: Exception, connectors: Mapping[str, Connector], *, is_alone: bool
) -> Any:
    """Call `restore` with the next newest checkpoint after `error`, if the `url` that could not be restored came from
    `latest` and was removed.

    Raises `error` if it was not removed. For another URL the error says that it was removed; so it does if several
    ranks restore (`is_alone` is False), because they would have to agree on the next.
    """
    for number in range(1, _MAX_REMOVED + 1):
        url = _next(url, error, connectors, is_last=number == _MAX_REMOVED or not is_alone)
        try:
            return restore(url)
        except STORE_FAILURES:
            raise
        except (CheckpointError, FormatError, ConnectorError) as again:
            error = again
    raise AssertionError


def _next(url: Url, error: Exception, connectors: Mapping[str, Connector], *, is_last: bool) -> str:
    """The URL of the next newest checkpoint. Raises `error`, which restoring `url` met, unless that was removed."""
    prefix = prefix_of(url)
    if prefix is None:
        if isinstance(error, NothingThereError) or is_there(url, connectors):
            raise error
        raise _removed(url, error) from error
    if _is_whole(url, connectors):
        raise error
    try:
        newest = latest(prefix, connectors=connectors)
    except CheckpointError:
        raise error from None
    if is_last or newest == url:
        raise _removed(url, error) from error
    logger.warning(
        "%s was removed before it was read; %s is restored in its place", printable(os.fspath(url)), printable(newest)
    )
    return newest


def _removed(url: Url, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{os.fspath(url)} was removed before it was read, as `keep` of a running job does: restore the next newest "
        "(loaderkit.checkpoint.latest), or let that job keep more",
        touched=getattr(error, "touched", ()),
    )


def _is_whole(url: Url, connectors: Mapping[str, Connector]) -> bool:
    try:
        check_whole(url, "auto", connectors)
    except (CheckpointError, FormatError, ConnectorError):
        return False
    return True
