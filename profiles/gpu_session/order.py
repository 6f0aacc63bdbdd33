"""One batch ahead and eight: the same batches to the last byte, over three epochs."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder
from profiles.gpu_session.pictures_pipeline import ahead, crops


def measure(context: Context) -> None:
    """Copies of every batch, kept where they are: to bring 154 MB to the host takes longer than to decode them."""
    pipeline = crops(context, decoder(context))
    found: dict[int, list[tuple[Any, ...]]] = {}
    for num_ahead in (1, 8):
        begin_s = time.perf_counter()
        with loaderkit.build(pipeline, overrides=ahead(**{"prefetch.batches": num_ahead})) as loader:
            found[num_ahead] = []
            for batch in itertools.chain.from_iterable(loader for _ in range(context.sized(3, 2))):
                found[num_ahead].append((batch["__key__"], batch["label"].clone(), batch["image"].clone()))
                if len(found[num_ahead]) == 1:
                    context.report.add(**{f"{num_ahead}_ahead_first_s": time.perf_counter() - begin_s})
            context.wait()
            context.report.add(**{f"{num_ahead}_ahead_epochs_s": time.perf_counter() - begin_s})
        context.report.add(**{f"{num_ahead}_ahead_s": time.perf_counter() - begin_s})
    assert len(found[1]) == len(found[8])
    different = sum(not _same(one, other) for one, other in zip(found[1], found[8], strict=True))
    context.report.add(num_batches=len(found[1]), num_different=different)
    assert different == 0, f"{different} of {len(found[1])} batches differ between one batch ahead and eight"


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))
