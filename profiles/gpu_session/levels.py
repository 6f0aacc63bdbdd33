"""Crops decoded on the CPU and on the GPU: the same samples, crops and flips, and pixels that differ by few levels."""

from __future__ import annotations

import torch

import loaderkit
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import decoder, levels
from profiles.gpu_session.pictures_pipeline import ahead, crops

_MEAN, _MEAN_OF_A_PICTURE = 2.0, 4.0  # as the tests marked `gpu` ask


def measure(context: Context) -> None:
    """An epoch, or as much of it as a second or two gives."""
    num_batches = context.sized(4, 2)
    means, most, worst = [], 0.0, 0.0
    with (
        loaderkit.build(crops(context), overrides=ahead()) as ours,
        loaderkit.build(crops(context, decoder(context)), overrides=ahead()) as theirs,
    ):
        for _, one, other in zip(range(num_batches), ours, theirs, strict=False):
            assert one["__key__"] == other["__key__"]
            assert torch.equal(one["label"].cpu(), other["label"].cpu())
            difference = (levels(one["image"]) - levels(other["image"])).abs()
            of_pictures = difference.flatten(1).mean(1)
            means.append(of_pictures.mean().item())
            worst = max(worst, of_pictures.max().item())
            most = max(most, difference.max().item())
        graph = theirs.stats().to_dict()["tuning"].get("graph")
    context.report.add(most_levels=most, graph=graph, num_batches=num_batches)
    context.report.bar("mean_levels", sum(means) / len(means), most=_MEAN)
    context.report.bar("most_mean_levels_of_a_picture", worst, most=_MEAN_OF_A_PICTURE)
