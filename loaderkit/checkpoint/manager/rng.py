"""The states of the random number generators of a training process, to be saved and restored with it."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from loaderkit.errors import StateError

_PYTHON_VERSION = 3  # of the state of `random`
_MT19937_WORDS = 624


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
        if self._rank is not None:
            return self._rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return int(os.environ.get("RANK", "0"))

    def state_dict(self) -> dict[str, Any]:
        """The states now, under "rank-<number>"."""
        _, words, gauss = random.getstate()
        numpy_state: Any = np.random.get_state(legacy=False)
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {"words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                "position": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "gauss": float(numpy_state["gauss"]),
            },
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


def _set(state: dict[str, Any]) -> None:
    python, numpy_state = state["python"], state["numpy"]
    words = tuple(python["words"].tolist())
    key = numpy_state["key"].numpy().astype(np.uint32)
    if len(words) != _MT19937_WORDS + 1 or key.shape != (_MT19937_WORDS,):
        raise StateError("the state of a random number generator is damaged, or of another version of Python or NumPy")
    torch.set_rng_state(state["torch"].cpu())
    random.setstate((_PYTHON_VERSION, words, python["gauss"]))
    np.random.set_state(("MT19937", key, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"]))
    devices = state.get("cuda", {})
    if devices and torch.cuda.is_available():
        # Otherwise CUDA begins later, and with it come the seeds of an earlier `torch.manual_seed`.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number in range(min(torch.cuda.device_count(), len(devices))):
            torch.cuda.set_rng_state(devices[str(number)].cpu(), number)
