"""`sanitize_boxes`: drops the boxes of which little is left, with what belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from loaderkit._internal.config.settings import as_tuple
from loaderkit.engine.work import Stage
from loaderkit.samples.sample import Sample
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind, annotations_of
from loaderkit.stages.image.boxes import BoxFormat, as_boxes, canvas_of, clipped, corners_of
from loaderkit.stages.runner import each_sample
from loaderkit.stages.values import describe


class SanitizeBoxesArgs(StageArgs):
    """Clip boxes to the image, and drop those that are too small, together with what belongs to them."""

    labels: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        description="fields with one entry for each box (classes, keypoints, ...), of which the same ones are dropped; [] if "
        "there are none. Masks of instances that `decode` names are among them anyway, if it names one field of boxes"
    )
    min_size: float = Field(1.0, gt=0, description="the least width and height, in pixels")
    min_area: float = Field(1.0, gt=0, description="the least width x height")
    boxes: str | None = Field(None, description="the field of boxes; default: the one that `decode` names")


def sanitize_boxes(
    args: SanitizeBoxesArgs, name: str, box_format: BoxFormat, instances: tuple[str, ...] = ()
) -> Callable[..., None]:
    """A function of one sample. A box is dropped if a side or its area is too small once it is clipped, and with it its entries
    in `labels` and `instances`."""
    belonging = dict.fromkeys(args.labels, "labels") | dict.fromkeys(instances, "instance_masks")

    def run(sample: Sample, draws: Any = None, scratch: Any = None) -> None:
        canvas = canvas_of(sample)
        assert canvas is not None
        corners = clipped(corners_of(sample, name, box_format), canvas[1])
        sides = corners[:, 2:] - corners[:, :2]
        is_kept = (sides >= args.min_size).all(1) & (sides.prod(1) >= args.min_area)
        chosen = {label: _chosen(sample, label, is_kept, by) for label, by in belonging.items()}
        sample.update(chosen)
        sample[name] = as_boxes(corners[is_kept], box_format)

    return run


def _chosen(sample: Sample, name: str, is_kept: NDArray[np.bool_], by: str) -> Any:
    """The entries of a field, which the argument `by` names, whose boxes are kept. Raises ValueError unless it has one for
    each box."""
    if name not in sample:
        raise ValueError(f"it has no field {name!r}, which `{by}` names, only {', '.join(sample)}")
    value = sample[name]
    is_list = isinstance(value, (list, tuple))
    if not is_list and not (isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim):
        raise ValueError(f"its field {name!r} is {describe(value)}, which has no entries for boxes: `{by}` names it")
    if len(value) != len(is_kept):
        raise ValueError(f"its field {name!r} has {len(value)} entries for {len(is_kept)} boxes: `{by}` names it")
    if is_list:
        return [item for item, keeps in zip(value, is_kept, strict=True) if keeps]
    return value[is_kept] if isinstance(value, np.ndarray) else value[torch.from_numpy(is_kept)]


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    args, boxes = stage.args, context.annotations.boxes
    assert isinstance(args, SanitizeBoxesArgs)
    name = args.boxes or next(iter(boxes))
    run = sanitize_boxes(args, name, boxes[name], context.annotations.instances if len(boxes) == 1 else ())
    return stage.ready("sample", each_sample(run, 0, context.keys(stage), context.failed(stage), reuse=False))


def _check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    args = stages[number].args
    assert isinstance(args, SanitizeBoxesArgs)
    boxes = annotations_of(stages[:number], kinds).boxes
    if not boxes:
        add_error(number, "no `decode` before it names boxes, as in `decode: {boxes: {boxes: xyxy}}`")
    elif args.boxes is None and len(boxes) > 1:
        add_error(number, f"`decode` names several fields of boxes ({', '.join(boxes)}): set `boxes` to one of them")
    elif args.boxes is not None and args.boxes not in boxes:
        add_error(number, f"`decode` names the boxes {', '.join(boxes)}, not {args.boxes!r}", "boxes")


SANITIZE_BOXES = StageKind(
    SanitizeBoxesArgs, "sample", compile=_compile, check=_check, only_computes=True, is_contained=True
)
