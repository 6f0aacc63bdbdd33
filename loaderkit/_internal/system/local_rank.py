"""The local rank: the number of this process among those that a launcher started on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process among those of its job on this machine, as its launcher says; else 0."""
    numbers = (environment.get(name, "") for name in _LOCAL_RANKS)
    return next((int(number) for number in numbers if number.isdecimal()), 0)
