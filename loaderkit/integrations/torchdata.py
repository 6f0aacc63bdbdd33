"""A loader as a node of torchdata: `torchdata.nodes.Loader(loader.as_node())` gives its batches, and its state resumes exactly.

node ──> torchdata.nodes.Loader, or any node around it ──> state_dict() has the loader's own state
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode

from loaderkit.pipeline.delivery.batch_numbers import DataLoaderParts

_LOADER = "loader"


class LoaderNode(BaseNode[Any]):  # type: ignore[misc]
    """Its items are the loader's batches. Each `reset` without a state begins the loader's next epoch."""

    def __init__(self, loader: DataLoaderParts) -> None:
        super().__init__()
        self._loader = loader
        self._batches: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or continue behind the batch after which `initial_state` was taken. Raises StateError."""
        super().reset(initial_state)
        if initial_state is not None:
            self._loader.load_state_dict(initial_state[_LOADER])
        self._batches = iter(self._loader)

    def next(self) -> Any:
        """The next batch of the epoch."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The loader's state, as JSON values."""
        return {_LOADER: self._loader.state_dict()}
