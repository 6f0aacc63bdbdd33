"""Sources in which each sample is one range that has to be parsed, and the reader for them."""

from __future__ import annotations

from abc import abstractmethod

from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.sources.base import ReadContext, Reader
from loaderkit.sources.ranges import RangeReader, RangeSource


class SerialSource(RangeSource):
    """A source whose samples lie one behind another in large objects: each is one range, which `parse` turns into fields."""

    is_typed = False
    has_untyped_arrays = True

    @abstractmethod
    def parse(self, index: int, data: memoryview) -> Sample:
        """The fields in the bytes of a sample, none of which refers to `data`. Raises `FormatError`."""

    def reader(self, context: ReadContext) -> Reader:
        """A reader that parses what it reads."""
        return SerialReader(self, context)


class SerialReader(RangeReader):
    """Reads samples and parses them."""

    def __init__(self, source: SerialSource, context: ReadContext) -> None:
        super().__init__(source, context, value_of=_bytes)
        self._parse = source.parse

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`."""
        num_bytes = super().read(chunk)
        for row, index in enumerate(chunk.source_indices.tolist()):
            sample = chunk.samples[row]
            if sample is not None:
                chunk.current = row
                (data,) = sample.values()
                try:
                    chunk.samples[row] = self._parse(index, data)
                except Exception as error:
                    self._failed(chunk, row, error)
        chunk.current = None
        return num_bytes


def _bytes(data: memoryview, extension: str) -> memoryview:
    return data
