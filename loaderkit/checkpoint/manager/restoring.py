"""Restores the newest checkpoint that turns out to be whole while it is read, the same one on every rank.

rank 0: the next candidate ──> posted ──> all: restored ──> posted: how it went ──> one failed: is it damaged? rank 0 reads it
                                                                                    yes: the next candidate; no: the error
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from torch.distributed.checkpoint.api import CheckpointException

from loaderkit.checkpoint.discovery.verify import verify_checkpoint
from loaderkit.checkpoint.manager.tiers import Tiers, warn_damaged
from loaderkit.checkpoint.restore.objects import listed
from loaderkit.checkpoint.restore.stateful import StateMismatchError
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, printable
from loaderkit.ranks.board import Board

logger = logging.getLogger("loaderkit")
_DOING = "a checkpoint is restored"
Restore = Callable[[str, str | None, set[str]], None]
"""Restores a URL; of the URL of what was saved without optimizers, if given, only these. Adds to a set the names of what it
fills, before the first is."""


def restore_newest(
    tiers: Tiers,
    step: int | None,
    restore: Restore,
    *,
    board: Board | None,
    key: str,
    connectors: dict[str, Connector],
) -> int | None:
    """Call `restore` with the URL of the newest whole checkpoint, or of that of `step`, and None; its step. None: there is
    none. Of one without the state of optimizers it is called before with the newest that has it, and the URL of that without.

    If that fails on any rank because the checkpoint is damaged, the next one is taken, as `Tiers.whole` gives them. Raises what
    it raises, what `restore` raises, and CheckpointError if the next one lacks what the damaged one may have filled.
    """
    spoilt: set[str] = set()  # names of what damaged ones may have filled
    candidates = tiers.whole(step) if board is None or board.rank == 0 else iter(())
    failure: BaseException | None = None
    for number in itertools.count():
        about = f"{key}/{number}"
        found = _agreed(board, about, candidates, tiers)
        if found is None:
            if failure is not None:
                raise failure
            return None
        chosen, urls = found
        if (
            board is not None
        ):  # `restore` may call a collective, which knows neither of a rank that has left nor of our timeout
            board.post(f"{about}/begins/{board.rank}")
            board.collect(f"{about}/begins", about=about, doing=_DOING)
        if tiers.starts is not None:
            tiers.starts.begin(urls[-1])
        begun: set[str] = set()
        error = _error_of(restore, urls, begun, board, about)
        if error is None and (left := spoilt - begun):
            error = CheckpointError(
                f"{urls[-1]} is restored, and has no {listed(left)}, which may have bytes of the damaged checkpoint that "
                "was tried before: remove that one, and restore into a new state"
            )
            error.__cause__ = failure
        if not _has_failed(board, about, error):
            return chosen
        spoilt |= begun
        reason = _judged(board, about, urls, tiers, connectors)
        if not reason:
            raise error or CheckpointError(f"another rank could not restore {urls[-1]}")
        failure = failure or error or CheckpointError(f"{urls[-1]} is damaged: {reason}")
    raise AssertionError


def _agreed(
    board: Board | None, about: str, candidates: Iterator[tuple[int, str]], tiers: Tiers
) -> tuple[int, list[str]] | None:
    """The step and the URLs of the next candidate, from rank 0: those to be restored one after the other."""
    if board is not None and board.rank > 0:
        said = json.loads(board.wait_for(about, 0, about=about, doing="rank 0 looks for the newest checkpoint"))
        return None if said is None else (said[0], said[1])
    try:
        with nullcontext() if board is None else board.alive(about):
            found = _next(candidates, tiers)
    except BaseException as error:
        if board is not None:
            board.fail(about, error)
        raise
    if board is not None:
        board.post(about, json.dumps(found).encode())
    return found


def _next(candidates: Iterator[tuple[int, str]], tiers: Tiers) -> tuple[int, list[str]] | None:
    found = next(candidates, None)
    if found is None:
        return None
    step, url = found
    if not tiers.is_partial(step):
        return step, [url]
    base = tiers.base_of(step)
    if base is None:
        logger.warning(
            "%s was saved upon a notice without the state of optimizers, which begin anew: there is no checkpoint before it",
            printable(url),
        )
        return step, [url]
    logger.warning(
        "%s was saved upon a notice without the state of optimizers, which are restored from %s",
        *map(printable, (url, base)),
    )
    return step, [base, url]


def _error_of(
    restore: Restore, urls: Sequence[str], begun: set[str], board: Board | None, about: str
) -> BaseException | None:
    """What restoring met on this rank."""
    try:
        with nullcontext() if board is None else board.alive(about):
            for url in urls:
                restore(url, None if url == urls[-1] else urls[-1], begun)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if _says_damaged(error):
            return error
        if board is not None:
            board.fail(about, error)
        raise
    return None


def _says_damaged(error: BaseException) -> bool:
    """True for an error that a damaged checkpoint gives."""
    if isinstance(error, CheckpointException):
        return any(_says_damaged(inner) for inner, _ in error.failures.values())
    is_checked = isinstance(error, (CheckpointError, FormatError, ConnectorError))
    return is_checked and not isinstance(error, StateMismatchError)


def _has_failed(board: Board | None, about: str, error: BaseException | None) -> bool:
    """True if any rank has failed."""
    if board is None:
        return error is not None
    board.post(f"{about}/failed-on/{board.rank}", b"" if error is None else b"1")
    return any(board.collect(f"{about}/failed-on", about=about, doing=_DOING))


def _judged(
    board: Board | None, about: str, urls: Sequence[str], tiers: Tiers, connectors: dict[str, Connector]
) -> str:
    """What is damaged in what was not restored; "": nothing. Rank 0 reads it."""
    if board is not None and board.rank > 0:
        return board.wait_for(f"{about}/damage", 0, about=about, doing="rank 0 verifies a checkpoint").decode()
    with nullcontext() if board is None else board.alive(about):
        damage = ((url, _damage_in(url, tiers.is_local(url), connectors)) for url in reversed(urls))
        url, reason = next(((url, reason) for url, reason in damage if reason), ("", ""))
    if reason:
        warn_damaged(url, reason)
    if board is not None:
        board.post(f"{about}/damage", reason.encode())
    return reason


def _damage_in(url: str, is_local: bool, connectors: dict[str, Connector]) -> str:
    try:
        damage = verify_checkpoint(url, connectors=connectors).damage
        return f"it is damaged: {'; '.join(damage[:3])}" if damage else ""
    except (CheckpointError, FormatError) as error:
        return str(error)
    except ConnectorError as error:  # a store that has failed says nothing of the checkpoint; of a local disk it does
        return str(error) if is_local else ""
