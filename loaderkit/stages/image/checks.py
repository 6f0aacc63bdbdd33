"""Checks that the stages after `decode` allow its settings: `scaled`, or a DALI device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loaderkit.stages.base import AddError, StageConfig
from loaderkit.stages.context import StageKind
from loaderkit.stages.image.ops import Adjust

ANNOTATED = ("masks", "boxes", "keypoints", "instance_masks")


def check_decode(
    stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError
) -> None:
    """Add errors for what `decode`, the stage at `number`, cannot do with the stages behind it."""
    decode = stages[number].args
    names = [name for key in ANNOTATED for name in {*(getattr(decode, key, None) or ())}]
    for name in sorted({name for name in names if names.count(name) > 1}):
        add_error(
            number,
            f"{name!r} is named more than once in `masks`, `boxes`, `keypoints` and `instance_masks`: a field is one of them",
        )
    _check_scaled(stages, number, kinds, add_error)
    if getattr(decode, "depth", 8) == 16:
        _check_depth(stages, number, kinds, add_error)
    if getattr(decode, "device", "cpu") != "cpu":
        _check_dali(stages, number, kinds, add_error)


def _check_depth(
    stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError
) -> None:
    """Images of 16 bits pass only stages that take them."""
    if getattr(stages[number].args, "device", "cpu") != "cpu":
        add_error(number, "16 bits not inside DALI: use `device: cpu`", "depth")
    takers = ", ".join(name for name, kind in kinds.items() if kind.takes_16_bits)
    for later, stage in enumerate(stages[number + 1 :], number + 1):
        kind = kinds[stage.kind]
        if kind.needs_images and not kind.takes_16_bits:
            add_error(
                later,
                f"`{stage.kind}` takes images of 8 bits, and `decode: {{depth: 16}}` gives 16: {takers} take them",
            )


def _check_scaled(
    stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError
) -> None:
    """An image decoded at reduced size must be resized to its final size before another stage sees it."""
    args = stages[number].args
    if not getattr(args, "scaled", False):
        return
    if media := [name for name in ("video", "audio") if getattr(args, name, None) is not None]:
        add_error(number, f"`scaled: true` is of pictures, and not with `{media[0]}`", "scaled")
        return
    following = next((stage for stage in stages[number + 1 :] if not kinds[stage.kind].is_pointwise), None)
    if following is None or "antialias" not in type(following.args).model_fields:
        name = f"`{following.kind}`" if following is not None else "nothing"
        reason = f"`resize` or `random_resized_crop` has to come next, and {name} does"
    elif getattr(following.args, "interpolation", None) != "bilinear" or not getattr(
        following.args, "antialias", False
    ):
        reason = f"`{following.kind}` has to be bilinear and antialiased"
    elif getattr(following.args, "fields", None) is not None:
        reason = f"`{following.kind}` has to act on all images, and it names `fields`"
    else:
        return
    add_error(number, f"`scaled: true` decodes images smaller: {reason}", "scaled")


def _check_dali(
    stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError
) -> None:
    """DALI must support the stages up to `batch`."""
    decode = stages[number].args
    for name in ("scaled", *ANNOTATED, "exif_orientation", "channels", "video", "audio"):
        if getattr(decode, name) not in (None, False, 3) and getattr(decode, name):
            add_error(number, f"not with `device: {getattr(decode, 'device', None)}`: use `device: cpu`", name)
    is_whole = True
    for later, stage in enumerate(stages[number + 1 :], number + 1):
        kind = kinds[stage.kind]
        if kind.scope == "boundary":
            return
        if is_whole and kind.ops is not None and not kind.shrinks and Adjust in kind.ops(stage.args).kinds:
            add_error(
                later,
                f"`{stage.kind}` of whole images may take gigabytes inside DALI: put it after a crop or resize, or "
                "use `decode: {device: cpu}`",
            )
        is_whole = is_whole and not kind.shrinks
        if kind.ops is None or not kind.runs_in_dali:
            hint = "put it after `batch`, or " if kind.scope == "either" else ""
            add_error(later, f"`{stage.kind}` cannot run inside DALI: {hint}use `decode: {{device: cpu}}`")
            continue
        _check_dali_arguments(stage, later, getattr(decode, "fields", None), add_error)


def _check_dali_arguments(
    stage: StageConfig, number: int, decoded: tuple[str, ...] | None, add_error: AddError
) -> None:
    instead = "`decode: {device: cpu}`"
    interpolation, named = getattr(stage.args, "interpolation", None), getattr(stage.args, "fields", None)
    if interpolation == "nearest":
        add_error(
            number, f"nearest takes other pixels inside DALI: use bilinear or bicubic, or {instead}", "interpolation"
        )
    if interpolation == "bicubic" and not getattr(stage.args, "antialias", True):
        add_error(
            number, f"bicubic without it is another filter inside DALI: leave it on, or use {instead}", "antialias"
        )
    if stage.args.workers != "auto":
        add_error(number, f"`{stage.kind}` runs inside `decode` here: set `workers` there", "workers")
    if named is not None and set(named) != set(decoded or ()):
        add_error(
            number,
            f"DALI does the same to all images that it decodes: name {list(named)} in `decode` as well, or use {instead}",
            "fields",
        )
