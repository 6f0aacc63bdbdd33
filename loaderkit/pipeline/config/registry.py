"""Which kinds of source and stage there are. To add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from loaderkit.connectors.config import SourceArgs
from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs
from loaderkit.sources.array import ArrayArgs
from loaderkit.sources.dataset import DatasetArgs
from loaderkit.sources.files import FilesArgs
from loaderkit.sources.tar import TarArgs
from loaderkit.stages.base import StageArgs
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.call import CallArgs
from loaderkit.stages.image import color, geometry
from loaderkit.stages.image.decode import DecodeArgs, decode
from loaderkit.stages.image.normalize import NormalizeArgs
from loaderkit.stages.image.ops import ImageOps
from loaderkit.stages.read import ReadArgs
from loaderkit.stages.transfer import TransferArgs

Scope = Literal["sample", "boundary", "batch", "either"]


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: its arguments, on which side of `batch` it may stand, and whether it needs images.

    `make` and `num_draws` belong to stages that are functions of one sample; the others are wired in `builder.py`.
    """

    args: type[StageArgs]
    scope: Scope
    needs_images: bool = False
    make: Callable[[Any], Callable[..., Any]] | None = None
    num_draws: int = 0
    steps: Callable[[Any], ImageOps] | None = None  # what it does, for whoever decodes, and works on pixels elsewhere


STAGES: Mapping[str, StageKind] = MappingProxyType(
    {
        "read": StageKind(ReadArgs, "sample"),
        "decode": StageKind(DecodeArgs, "sample", make=decode),
        "resize": StageKind(geometry.ResizeArgs, "sample", True, geometry.resize, steps=geometry.resize_steps),
        "center_crop": StageKind(
            geometry.CenterCropArgs, "sample", True, geometry.center_crop, steps=geometry.center_crop_steps
        ),
        "random_crop": StageKind(
            geometry.RandomCropArgs, "sample", True, geometry.random_crop, 2, steps=geometry.random_crop_steps
        ),
        "random_resized_crop": StageKind(
            geometry.RandomResizedCropArgs,
            "sample",
            True,
            geometry.random_resized_crop,
            geometry.RANDOM_RESIZED_CROP_DRAWS,
            steps=geometry.random_resized_crop_steps,
        ),
        "random_horizontal_flip": StageKind(
            geometry.RandomHorizontalFlipArgs,
            "sample",
            True,
            geometry.random_horizontal_flip,
            1,
            steps=geometry.random_horizontal_flip_steps,
        ),
        "color_jitter": StageKind(
            color.ColorJitterArgs,
            "sample",
            True,
            color.color_jitter,
            color.COLOR_JITTER_DRAWS,
            steps=color.color_jitter_steps,
        ),
        "call": StageKind(CallArgs, "either"),
        "batch": StageKind(BatchArgs, "boundary"),
        "normalize": StageKind(NormalizeArgs, "batch", True),
        "transfer": StageKind(TransferArgs, "batch"),
    }
)

SOURCES: Mapping[str, type[SourceArgs]] = MappingProxyType(
    {"files": FilesArgs, "tar": TarArgs, "array": ArrayArgs, "dataset": DatasetArgs, "checkpoint": CheckpointArgs}
)
