"""What each rank has of its own in a checkpoint: an object's state, such as a loader's, and the random number generators."""

from __future__ import annotations

import os
import random
from typing import Any, cast

import numpy as np
import torch
from numpy.random.mtrand import set_bit_generator

from loaderkit.errors import StateError

_PYTHON_VERSION = 3  # of the state of `random`
_MT19937_WORDS = 624


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size): those given, else those of torch.distributed, else of the environment, else 0 and 1."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        found = distributed.get_rank(), distributed.get_world_size()
    else:
        found = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return found[0] if rank is None else rank, found[1] if world_size is None else world_size


class PerRank:
    """The state of an object, kept for each rank: `{"model": model, "loader": PerRank(loader)}`.

    `value` is an object with `state_dict` and `load_state_dict`. Each rank saves its own under its number, and gets it back;
    another number of ranks than saved it is refused, as there is no state for it. `rank`, `world_size`: default those of
    torch.distributed, else of the environment (`RANK`, `WORLD_SIZE`), else 0 and 1.
    """

    def __init__(self, value: Any, rank: int | None = None, world_size: int | None = None) -> None:
        self.value = value
        self._rank, self._world_size = rank, world_size

    @property
    def rank_keys(self) -> frozenset[str]:
        """The keys of all ranks' states, by which a restore tells beforehand whether a checkpoint has them."""
        return frozenset(f"rank-{rank}" for rank in range(_place(self._rank, self._world_size)[1]))

    def state_dict(self) -> dict[str, Any]:
        """The object's state now, under "rank-<number>"."""
        return {f"rank-{_place(self._rank, self._world_size)[0]}": self.value.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the object the state of this rank. Raises StateError if another number of ranks has saved it."""
        if state.keys() != self.rank_keys:
            raise StateError(
                f"the state of a {type(self.value).__name__} of each rank has {', '.join(map(repr, state)) or 'nothing'}, and "
                f"here are {len(self.rank_keys)} ranks: restore with as many as saved it, or leave it out and begin it anew"
            )
        self.value.load_state_dict(state[f"rank-{_place(self._rank, self._world_size)[0]}"])


class RngState:
    """The global generators of this rank: torch's on the CPU and on CUDA devices in use, NumPy's and Python's.

    It belongs into the state that is saved: `{"model": model, "rng": RngState()}`. Each rank saves its own under its number and
    gets it back. A rank that has none, since there are more ranks than there were, begins with a seed drawn from that of
    another and its own number: no two ranks then draw the same. `rank`: default that of torch.distributed, else of the
    environment (`RANK`), else 0. Tensors and plain values only; nothing is pickled.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank

    @property
    def rank(self) -> int:
        """The number under which the state is saved."""
        return _place(self._rank, None)[0]

    def state_dict(self) -> dict[str, Any]:
        """The states now, under "rank-<number>"."""
        _, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {"words": torch.tensor(words), "gauss": gauss},
            "numpy": _numpy_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = {str(number): one for number, one in enumerate(torch.cuda.get_rng_state_all())}
        return {f"rank-{self.rank}": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to the states of this rank. Raises StateError for what `state_dict` has not returned."""
        ranks = sorted(int(name.removeprefix("rank-")) for name in state if name.startswith("rank-"))
        if not ranks:
            raise StateError(f"this is no state of random number generators: it has {', '.join(state) or 'nothing'}")
        rank = self.rank
        if rank in ranks:
            _set(state[f"rank-{rank}"])
            return
        _set(state[f"rank-{ranks[rank % len(ranks)]}"])
        seed = (int(torch.randint(2**62, ()).item()) ^ (rank * 0x9E3779B97F4A7C15)) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _numpy_state() -> dict[str, Any]:
    """That of NumPy's global generator, which `np.random.set_bit_generator` may have replaced by another kind."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return dict(state)
    return {
        "key": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _set_numpy(state: dict[str, Any]) -> None:
    kind, now = state.get("bit_generator", "MT19937"), cast(Any, np.random.get_state(legacy=False))
    if now["bit_generator"] != kind:
        make = getattr(np.random, kind, None)
        if not isinstance(make, type) or not issubclass(make, np.random.BitGenerator):
            raise StateError(
                f"the state of NumPy's generator is one of {kind!r}, which this version of NumPy does not have"
            )
        set_bit_generator(make())
    if kind == "MT19937":
        key = state["key"].numpy().astype(np.uint32)
        np.random.set_state((kind, key, state["position"], state["has_gauss"], state["gauss"]))
    else:
        np.random.set_state(state)


def _set(state: dict[str, Any]) -> None:
    python, numpy_state = state["python"], state["numpy"]
    words = tuple(python["words"].tolist())
    key = numpy_state.get("key")
    if len(words) != _MT19937_WORDS + 1 or (key is not None and tuple(key.shape) != (_MT19937_WORDS,)):
        raise StateError("the state of a random number generator is damaged, or of another version of Python or NumPy")
    torch.set_rng_state(state["torch"].cpu())
    random.setstate((_PYTHON_VERSION, words, python["gauss"]))
    _set_numpy(numpy_state)
    devices = state.get("cuda", {})
    if devices and torch.cuda.is_available():
        # Otherwise CUDA begins later, and with it come the seeds of an earlier `torch.manual_seed`.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number in range(min(torch.cuda.device_count(), len(devices))):
            torch.cuda.set_rng_state(devices[str(number)].cpu(), number)
