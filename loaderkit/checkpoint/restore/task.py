"""What one call of `loaderkit.restore` transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.restore.progress import Progress
from loaderkit.checkpoint.transfer.plan import ReadRequest

Restored = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""(tensors, plain values), both by name."""


@dataclass(frozen=True)
class RestoreTask:
    """The names to restore and the settings, the same for one rank and for several.

    `make_requests` is called once, with the checkpoint in which the layouts of the `tensors` are known.
    """

    tensors: list[str]
    values: list[str]
    make_requests: Callable[[Checkpoint], list[ReadRequest]]
    device: torch.device
    concurrency: int | Literal["auto"] = "auto"
    progress: Callable[[Progress], None] | None = None
    touched: set[str] = field(default_factory=set)  # names of the tensors that have been written to
