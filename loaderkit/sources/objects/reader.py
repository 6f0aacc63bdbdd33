"""Sources of Python objects whose items are the samples, and the reader for them."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from operator import getitem
from typing import Any

from loaderkit._internal.system.forks import ending_forks
from loaderkit.errors import USER_ERRORS
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.sources.base import ReadContext, Reader, Source


class ItemSource(Source):
    """A source of Python objects, which has no ranges."""

    is_typed = False
    runs_user_code = True
    dataset: Any
    """The object with the items: dataset[index]."""

    @abstractmethod
    def items(self, indices: list[int]) -> list[Any] | None:
        """Several items in one call; None if the object has no such call, or it failed."""

    @abstractmethod
    def sample(self, item: Any) -> Sample:
        """The fields of an item; a fresh dict. Raises ValueError."""

    @abstractmethod
    def columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        """The fields of several items, column by column; None if they need to be taken one by one."""

    def reader(self, context: ReadContext) -> Reader:
        """A reader that takes the items."""
        return ItemReader(self, context)


class ItemReader(Reader):
    """Takes the items of a source. They count as no bytes read."""

    def __init__(self, source: ItemSource, context: ReadContext) -> None:
        self._source, self._failed, self._is_last = source, context.failed, context.is_last
        self._get = ending_forks(getitem)
        self.owner = source.owner

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        source, failed = self._source, self._failed
        chunk.current = None
        indices = chunk.source_indices.tolist()
        items = self.take(chunk, indices)
        if items is None:
            items = self._one_by_one(chunk, indices)
        if self._is_last and chunk.work_item.specs and not chunk.failures and len(items) == len(indices):
            with suppress(ValueError):  # `sample` raises it again for the item concerned
                chunk.columns = source.columns(items)
        if chunk.columns is None:
            for row, item in enumerate(items):
                if row not in chunk.failures:
                    try:
                        chunk.samples[row] = source.sample(item)
                    except Exception as error:
                        failed(chunk, row, error)
        return 0

    def take(self, chunk: SampleChunk, indices: list[int]) -> list[Any] | None:
        """The items of a chunk in one call; None if they are to be taken one by one."""
        return self._source.items(indices)

    def _one_by_one(self, chunk: SampleChunk, indices: list[int]) -> list[Any]:
        dataset, get = self._source.dataset, self._get
        items: list[Any] = []
        chunk.current = items
        while len(items) < len(indices):
            try:
                for index in indices[len(items) :]:
                    items.append(get(dataset, index))  # noqa: PERF401 - those before an error stay
            except USER_ERRORS as error:
                self._failed(chunk, len(items), error)
                items.append(None)
        chunk.current = None
        return items
