"""Epochs with fewer batches than expected: a warning where `filter` left nothing of a batch, an error where there is none."""

from __future__ import annotations

import logging
from typing import NoReturn

from loaderkit.errors import SourceError, StageError

logger = logging.getLogger("loaderkit")


class EmptyBatches:
    """What a loader says of empty batches."""

    def __init__(self, filters: str) -> None:
        """`filters`: the names of the stages that drop samples."""
        self._filters = filters
        self._has_warned = False

    def warn(self, epoch: int, position: int) -> None:
        """Log the first batch that is skipped."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s left nothing of the batch at position %d of epoch %d: it is skipped, as all such batches are, which makes "
                "epochs shorter than len(loader); not for loops that count on that length (logged once)",
                self._filters,
                position,
                epoch,
            )

    def fail(self, epoch: int, num_empty: int) -> NoReturn:
        """Raise the error for a whole epoch without a batch: a loop over epochs would search for ever."""
        if not num_empty:
            raise SourceError(
                f"epoch {epoch} has no batch: the iterable ended before one was full on every rank. Can it be iterated over "
                "more than once? A function that makes it anew can"
            )
        raise StageError(
            f"{self._filters} dropped all samples of epoch {epoch}, so there is nothing to deliver: does the function return "
            "True for what is to be kept?",
            stage=self._filters,
            epoch=epoch,
        )
