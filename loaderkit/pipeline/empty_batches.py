"""Batches of which `filter` left nothing: passed over, unless other ranks would wait for them."""

from __future__ import annotations

import logging
from typing import NoReturn

from loaderkit.engine.contracts import Delivery
from loaderkit.errors import SourceError, StageError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.sampling.schedule import BatchSampler

logger = logging.getLogger("loaderkit")


class EmptyBatches:
    """Says what empty batches mean for the loop; one for each loader."""

    def __init__(self, config: PipelineConfig) -> None:
        self._filters = ", ".join(stage.name for stage in config.stages if stage.kind == "filter")
        self._has_warned = False

    def note(self, delivery: Delivery, schedule: BatchSampler) -> None:
        """Say so of the first empty batch. Raises StageError if there are other ranks."""
        told = f"{self._filters} dropped all samples of a batch of epoch {delivery.epoch} that ends at position {delivery.end}"
        if schedule.world_size > 1:
            raise StageError(
                f"{told}, on rank {schedule.rank} of {schedule.world_size}: this rank would have a batch less than others, "
                "which would wait for it in a collective operation for ever: use larger batches, or leave such samples "
                "out of the source",
                stage=self._filters,
                epoch=delivery.epoch,
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: it is passed over, as all such batches are, so an epoch has fewer (logged once)", told)

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
