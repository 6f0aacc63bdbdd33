"""Errors of files that are missing on one node only: they name the node."""

from __future__ import annotations

from loaderkit.engine.remote.delivery import Delivered
from loaderkit.errors import ObjectNotFoundError


def name_node(batch: Delivered, where: str) -> Delivered:
    """The batch; if a file or object was not found for it, its errors name the node that did not find it."""
    for error in (batch.error, *(failure.error for failure in batch.failures)):
        if error is not None and _is_missing(error) and error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}; {where} has looked for it, and every node needs it", *error.args[1:])
    return batch


def _is_missing(error: BaseException) -> bool:
    related: BaseException | None = error
    while related is not None:
        if isinstance(related, (FileNotFoundError, ObjectNotFoundError)):
            return True
        related = related.__cause__ or related.__context__
    return False
