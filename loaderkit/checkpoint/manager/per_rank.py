"""An object whose state is another on every rank, such as a data loader that each rank has for itself."""

from __future__ import annotations

import os
from typing import Any

import torch

from loaderkit.errors import StateError


class PerRank:
    """The state of an object, kept for each rank: `{"model": model, "loader": PerRank(loader)}`.

    `value` is an object with `state_dict` and `load_state_dict`. Each rank saves its own under its number, and gets it back;
    another number of ranks than saved it is refused, as there is no state for it. `rank`, `world_size`: default those of
    torch.distributed, else of the environment (`RANK`, `WORLD_SIZE`), else 0 and 1.
    """

    def __init__(self, value: Any, rank: int | None = None, world_size: int | None = None) -> None:
        self.value = value
        self._rank, self._world_size = rank, world_size

    def _place(self) -> tuple[int, int]:
        """(rank, world_size)."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return (
            rank if self._rank is None else self._rank,
            world_size if self._world_size is None else self._world_size,
        )

    @property
    def rank_keys(self) -> frozenset[str]:
        """The keys of all ranks' states, by which a restore tells beforehand whether a checkpoint has them."""
        return frozenset(f"rank-{rank}" for rank in range(self._place()[1]))

    def state_dict(self) -> dict[str, Any]:
        """The object's state now, under "rank-<number>"."""
        return {f"rank-{self._place()[0]}": self.value.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the object the state of this rank. Raises StateError if another number of ranks has saved it."""
        if state.keys() != self.rank_keys:
            raise StateError(
                f"the state of a {type(self.value).__name__} of each rank has {', '.join(map(repr, state)) or 'nothing'}, and "
                f"here are {len(self.rank_keys)} ranks: restore with as many as saved it, or leave it out and begin it anew"
            )
        self.value.load_state_dict(state[f"rank-{self._place()[0]}"])
