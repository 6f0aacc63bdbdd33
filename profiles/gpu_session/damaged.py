"""Three damaged files among 256: each costs its sample, and not much of the batch's time."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import loaderkit
from loaderkit import Pipeline
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder
from profiles.gpu_session.pictures_pipeline import SIZE, ahead


def measure(context: Context) -> None:
    """Seconds a batch with and without the damaged files."""
    as_device: Any = decoder(context)
    size = context.sized(256, 16)
    for name in ("whole", "damaged"):
        folder = _photos(context, name, size)
        made = Pipeline.files(folder, include="*.jpg").read().decode(device=as_device).random_resized_crop(SIZE)
        made = made.batch(size).transfer(str(context.device)).normalize().errors(on_bad_sample="skip")
        settings: dict[str, Any] = ahead(**{"prefetch.batches": 1})
        taken_s, counts = [], []
        with loaderkit.build(made, overrides=settings) as loader:
            for _ in range(context.sized(5, 2)):
                begin_s = time.perf_counter()
                counts.append(sum(len(batch["image"]) for batch in loader))
                context.wait()
                taken_s.append(time.perf_counter() - begin_s)
        context.report.add(**{f"{name}_first_s": taken_s[0], f"{name}_s_a_batch": statistics.median(taken_s[1:])})
        assert len(set(counts)) == 1, counts
        if name == "whole":
            assert counts[0] == size, counts
        else:
            context.report.bar("num_refused", size - counts[0], least=3, most=3)


def _photos(context: Context, name: str, size: int) -> Path:
    """As many photographs in one folder, three of them with a hole in their scan if they are to be damaged."""
    folder = context.work / name
    folder.mkdir()
    paths = sorted(context.photos().rglob("*.jpg"))[:size]
    for number, path in enumerate(paths):
        target = folder / f"{number:04}.jpg"
        shutil.copyfile(path, target)
        if name == "damaged" and number in (1, size // 2, size - 1):
            data = target.read_bytes()
            target.write_bytes(data[: len(data) // 2])
    return folder
