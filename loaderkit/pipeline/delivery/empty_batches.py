"""Epochs whose number of batches is known only at their end. Warns where `filter` left nothing of a batch, raises an
error where there is no batch, and has the messages for those who rely on a number."""

from __future__ import annotations

import logging
from types import FrameType
from typing import NoReturn

from loaderkit.errors import ConfigError, SourceError, StageError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.sampling.schedule import BatchSampler

_READS_AHEAD = ("lightning.", "pytorch_lightning.")  # by a batch, if there is no length

logger = logging.getLogger("loaderkit")


class EmptyBatches:
    """What a loader says of empty batches and of its length."""

    def __init__(self, config: PipelineConfig, schedule: BatchSampler) -> None:
        self._filters = config.filters
        self._schedule = schedule
        self._are_skipped = config.skips_empty_batches
        self._has_warned = self._has_noted = False

    def warn(self, epoch: int, position: int) -> None:
        """Log the first batch that is skipped."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s left nothing of the batch at position %d of epoch %d: it is skipped, as all such batches are (logged once)",
                self._filters,
                position,
                epoch,
            )

    def check_length(self) -> None:
        """Raise TypeError, as `len` does, if the number of batches is not known before the end of an epoch."""
        self._schedule.check_length()
        if self._are_skipped:
            raise TypeError(
                f"how many batches an epoch has shows when it ends, as {self._filters} may leave nothing of some, so there is "
                "no length: iterate to the end and count what is delivered, or leave out `on_empty_batch: skip`"
            )

    def check_number(self, number: int) -> None:
        """Raise ConfigError if `number` batches of an epoch, which a loop has had, do not determine where it stopped."""
        if number and self._are_skipped:
            raise ConfigError(
                f"where a loop stopped after {number} batches is not known, as {self._filters} may have skipped some: continue "
                "with load_state_dict instead, or leave out `on_empty_batch: skip`"
            )

    def say(self, schedule: BatchSampler) -> str:
        """How many batches an epoch has, and a space; "" if that is not known."""
        most = "at most " if self._are_skipped else ""
        return f"{most}{schedule.num_batches()} " if schedule.knows_length else ""

    def note_state(self, caller: FrameType) -> None:
        """Log, once, if a state within an epoch is asked for by a loop that has a batch on which it has not trained yet."""
        is_ahead = self._are_skipped or not self._schedule.knows_length
        if is_ahead and not self._has_noted and caller.f_globals.get("__name__", "").startswith(_READS_AHEAD):
            self._has_noted = True
            logger.warning(
                "Lightning saves within an epoch of unknown length, for which it has fetched a batch that is not trained yet: "
                "resumed from this checkpoint it leaves that batch out. Save at the ends of epochs, or give the loader a "
                "length (logged once)"
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
