"""A loader as an IterableDataset, for code that makes a torch DataLoader by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from loaderkit.errors import ConfigError
from loaderkit.pipeline.delivery.batch_numbers import DataLoaderParts


class BatchesDataset(IterableDataset[Any]):
    """Its items are whole batches: `DataLoader(dataset, batch_size=None, num_workers=0)`. Each iteration is an epoch."""

    def __init__(self, loader: DataLoaderParts) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch. Raises ConfigError in a worker of a DataLoader."""
        if get_worker_info() is not None:
            raise ConfigError(
                "DataLoader(num_workers=...) around a loader would give every batch once for each of its workers: the loader "
                "has workers of its own (prefetch.concurrency, prefetch.processes), so use num_workers=0"
            )
        return iter(self._loader)

    def __len__(self) -> int:
        """The number of batches of a whole epoch. Raises TypeError where it is not known."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, which torchdata's StatefulDataLoader saves."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the batch after which it was taken. Raises StateError."""
        self._loader.load_state_dict(state)
