"""Finds the newest complete checkpoint below a prefix, for a job that its scheduler has restarted."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from loaderkit.checkpoint.discovery.detect import NoCheckpointError
from loaderkit.checkpoint.discovery.listing import candidates_below, url_below
from loaderkit.checkpoint.discovery.locate import NothingThereError, locate
from loaderkit.checkpoint.discovery.manifest import Verify, read_manifest
from loaderkit.checkpoint.discovery.open import open_checkpoint
from loaderkit.checkpoint.transfer.fetch import fetch_of
from loaderkit.connectors.base import Connector
from loaderkit.errors import STORE_FAILURES, CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")
_MAX_LISTED = 10  # times that a prefix is listed because a checkpoint was removed meanwhile


_given: deque[tuple[str, str]] = deque(maxlen=64)  # (URL, prefix) of what `latest` has returned last


def prefix_of(url: str | os.PathLike[str]) -> str | None:
    """The prefix, if this very string object is what `latest` has returned for it. None for any other URL, even an
    equal text: a user who wrote the URL means that one checkpoint."""
    return next((prefix for given, prefix in tuple(_given) if given is url), None)


def latest(
    prefix: str | os.PathLike[str], *, verify: Verify = "auto", connectors: Mapping[str, Connector] | None = None
) -> str:
    """The URL of the newest complete checkpoint directly below `prefix`: "runs/a" holding "step-100/", "step-2000/".

    Newer is the larger step in the name ("step-2000" after "step-300"). Names without a step are older: those with
    another number, then those without ("handpicked.pt"), then the best ("model_best.pt"), which may be of any step;
    checkpoints that are equal by then are ordered by when they were written. A checkpoint is complete if its format
    says so, every file that it needs is there and long enough and, with a manifest, its sizes and its description are
    unchanged. Others are skipped with a warning that says why. Where no name has a step, `prefix` may be the checkpoint
    itself.

    If it is removed before `loaderkit.restore` has read it, as `keep` of a running job does, that restores the next newest.
    Raises CheckpointError if there is none, ConnectorError if the store cannot be reached.
    """
    given = connectors or {}
    names: list[str] | None = None
    skipped: list[str] = []
    for _ in range(_MAX_LISTED):
        before, names = names, _candidates(prefix, given)
        if names == before:
            break
        skipped = []
        for name, problem in examined(prefix, names, verify, given):
            if problem is None:
                newest = url_below(prefix, name) if name else os.fspath(prefix)
                if name:
                    _given.append((newest, os.fspath(prefix)))
                return newest
            if isinstance(problem, NothingThereError):  # removed meanwhile, so that there may be a newer one
                break
            logger.warning("%s is skipped: %s", printable(url_below(prefix, name)), problem)
            skipped.append(f"{name}: {problem}")
    reasons = "\n  ".join(skipped[:5])
    raise CheckpointError(
        f"no complete checkpoint is below {os.fspath(prefix)!r}"
        + (
            f"; {len(skipped)} were skipped:\n  {reasons}"
            if skipped
            else f"; there are {', '.join((names or [])[:3]) or 'no files'}"
        )
    )


def _candidates(prefix: str | os.PathLike[str], given: Mapping[str, Connector]) -> list[str]:
    """The names below a prefix, the newest first; "" for the prefix itself."""
    location = locate(prefix, given)
    try:
        return candidates_below(location)
    finally:
        location.close()


def examined(
    prefix: str | os.PathLike[str], names: Iterable[str], verify: Verify, given: Mapping[str, Connector]
) -> Iterator[tuple[str, Exception | None]]:
    """(name, what is wrong with it, or None for a whole checkpoint) of the names below a prefix that may be checkpoints.

    For a checkpoint that is gone the error is a NothingThereError. Raises ConnectorError if the store cannot be reached.
    """
    for name in names:
        url = url_below(prefix, name) if name else prefix
        try:
            check_whole(url, verify, given)
        except NoCheckpointError:
            continue
        except STORE_FAILURES:
            raise
        except (CheckpointError, FormatError, ConnectorError) as error:
            yield name, error if is_there(url, given) else NothingThereError(str(error))
        else:
            yield name, None


def is_there(url: str | os.PathLike[str], given: Mapping[str, Connector]) -> bool:
    """False if nothing is there; True also if that cannot be known."""
    try:
        locate(url, given).close()
    except NothingThereError:
        return False
    except (CheckpointError, FormatError, ConnectorError):
        return True
    return True


def check_whole(url: str | os.PathLike[str], verify: Verify, given: Mapping[str, Connector]) -> None:
    """Raise CheckpointError, FormatError or ConnectorError unless this is a whole checkpoint."""
    location = locate(url, given)
    try:
        fetch = fetch_of(location.connector)
        checkpoint = open_checkpoint(location, fetch)
        read_manifest(location.of(checkpoint), checkpoint, verify, fetch)
    finally:
        location.close()
