"""A loader's batches by their numbers in the epoch, as other libraries ask a DataLoader for its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class BatchesByNumber:
    """`loader.dataset`: as long as there are samples, and a DataLoader over it gets batches by their numbers."""

    def __init__(self, num_samples: int, rest_from: Callable[[int], Iterator[Any]]) -> None:
        """`rest_from(number)` iterates over the next epoch from that batch on."""
        self._num_samples = num_samples
        self._rest_from = rest_from
        self._rest: Iterator[Any] = iter(())
        self._number = -1  # of the next batch of `_rest`

    def __len__(self) -> int:
        """The number of samples, over all ranks."""
        return self._num_samples

    def __getitems__(self, number: int) -> Any:
        """The batch with this number. Numbers in a row are of one iteration; any other one begins the next epoch there."""
        if number != self._number:
            self._rest, self._number = self._rest_from(number), number
        self._number += 1
        return next(self._rest)


class BatchNumbers:
    """`loader.batch_sampler`: the numbers of an epoch's batches, and where other loops tell the loader its epoch."""

    def __init__(self, num_batches: int, set_epoch: Callable[[int], None]) -> None:
        self._num_batches = num_batches
        self.set_epoch = set_epoch  # the loader's

    @property
    def sampler(self) -> BatchNumbers:
        """This one: Lightning looks there for `set_epoch`."""
        return self

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_batches))
