"""Restores on one rank: it reads everything itself."""

from __future__ import annotations

import time

import torch

from loaderkit.checkpoint.restore.progress import progress_of
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.task import Restored, RestoreTask


def transfer(source: OpenCheckpoint, task: RestoreTask) -> Restored:
    """Read what `task` names. No tensor is written to before all plain values are read."""
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
