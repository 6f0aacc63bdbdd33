"""The task of one call of `loaderkit.restore`, and its transfer on a single rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from loaderkit.checkpoint.contents import Checkpoint
from loaderkit.checkpoint.restore.progress import Progress, progress_of
from loaderkit.checkpoint.restore.source import OpenCheckpoint
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


def transfer_alone(source: OpenCheckpoint, task: RestoreTask) -> Restored:
    """Read what `task` names, all of it on this rank. No tensor is written to before all plain values are read."""
    requests = task.make_requests(source.resolved(task.tensors))
    values = source.plain_values(task.values)
    tensors: dict[str, torch.Tensor] = {}
    begin_s = time.perf_counter()
    with source.transfer(requests, task.device, task.concurrency, touched=task.touched) as session:
        for delivered in session:
            tensors.update(delivered)
            if task.progress is not None:
                seconds = time.perf_counter() - begin_s
                task.progress(progress_of(source.contents, session.totals, session.plan.num_bytes, seconds))
    return tensors, values
