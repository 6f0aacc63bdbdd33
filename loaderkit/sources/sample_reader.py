"""The reader of a source whose samples are read one by one, by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loaderkit._internal.system.forks import ending_forks
from loaderkit.errors import USER_ERRORS
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.sources.base import ReadContext, Reader


class SampleReader(Reader):
    """Calls `get(index)`, from several threads at once, for each sample: a fresh dict, field -> value. If it raises, or
    returns anything else, that sample is bad."""

    def __init__(self, get: Callable[[int], Sample], context: ReadContext) -> None:
        self._get, self._failed = ending_forks(get), context.failed

    def read(self, chunk: SampleChunk) -> int:
        """See `Reader`. Counted as read are the bytes of fields that are bytes."""
        num_bytes = 0
        for row, index in enumerate(chunk.source_indices.tolist()):
            chunk.current = row
            try:
                sample = chunk.samples[row] = _checked(self._get(index))
            except USER_ERRORS as error:
                self._failed(chunk, row, error)
                continue
            num_bytes += sum(len(value) for value in sample.values() if isinstance(value, bytes))
        return num_bytes


def _checked(sample: Any) -> Sample:
    """A sample as stages change it: a dict."""
    if isinstance(sample, dict):
        return sample
    if isinstance(sample, Mapping):
        return dict(sample)
    raise TypeError(f"the source gave {_described(sample)} for it, and not a dict, field -> value")


def _described(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
