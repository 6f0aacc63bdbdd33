"""One batch ahead and eight: the same batches to the last byte, over three epochs."""

from __future__ import annotations

import itertools
import time

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder, digest
from profiles.gpu_session.pictures_pipeline import ahead, crops


def measure(context: Context) -> None:
    """Hashes of every batch."""
    pipeline, found = crops(context, decoder(context)), {}
    for num_ahead in (1, 8):
        begin_s = time.perf_counter()
        with loaderkit.build(pipeline, overrides=ahead(**{"prefetch.batches": num_ahead})) as loader:
            epochs = (loader for _ in range(context.sized(3, 2)))
            found[num_ahead] = [digest(batch) for batch in itertools.chain.from_iterable(epochs)]
        context.report.add(**{f"{num_ahead}_ahead_s": time.perf_counter() - begin_s})
    different = sum(one != other for one, other in zip(found[1], found[8], strict=True))
    context.report.add(num_batches=len(found[1]), num_different=different)
    assert different == 0, f"{different} of {len(found[1])} batches differ between one batch ahead and eight"
