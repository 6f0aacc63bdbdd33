"""Whether the stages of a pipeline fit together and fit the source, as far as the description tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loaderkit.connectors.config import SourceArgs
from loaderkit.pipeline.config.diagnostics import Problems, nearest
from loaderkit.pipeline.config.model import OrderArgs, StageConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.sources.fields import IMAGE_EXTENSIONS


def check_structure(
    source: SourceArgs, stages: tuple[StageConfig, ...], order: OrderArgs | None, reader: Problems
) -> None:
    """Complain of stages that are missing, on the wrong side of `batch`, or fed with what they cannot take."""
    if not stages:
        return
    kinds = [stage.kind for stage in stages]

    def complain(number: int, message: str) -> None:
        reader.complain(("stages", number), message)

    if kinds[0] != "read":
        if "read" in kinds:
            complain(kinds.index("read"), "`read` must be the first stage")
        else:
            complain(0, "the first stage must be `read`, which is missing")
    if type(source) is SOURCES["checkpoint"]:
        _check_restore(kinds, complain)
        return
    if "batch" not in kinds:
        complain(len(kinds) - 1, "no `batch` stage: samples must be gathered into batches, e.g. `- batch: {size: 64}`")
        return
    border = kinds.index("batch")
    for number, stage in enumerate(stages):
        scope = STAGES[stage.kind].scope
        if stage.kind in ("read", "batch", "decode") and kinds.index(stage.kind) != number:
            complain(number, f"a second `{stage.kind}`: a pipeline has one")
        elif scope == "batch" and number < border:
            complain(number, f"`{stage.kind}` acts on batches: put it after `batch`")
        elif scope == "sample" and number > border:
            complain(number, f"`{stage.kind}` acts on single samples: put it before `batch`")
    _check_fields(source, stages, reader)
    _check_scaled(stages, reader)
    check_lowered(stages, reader)
    if order is not None and order.shuffle == "block" and type(source) is SOURCES["dataset"]:
        reader.complain(
            ("order", "shuffle"),
            "block needs a source that knows where its bytes lie (files, tar, array); a data set object has none: "
            "use global or none",
        )


def _check_restore(kinds: list[str], complain: Callable[[int, str], None]) -> None:
    """The tensors of a checkpoint are read, and maybe sent to a GPU: that is all."""
    for number, kind in enumerate(kinds):
        if kind not in ("read", "transfer"):
            complain(
                number,
                f"`{kind}` acts on samples: of a checkpoint there are tensors, and `read` and `transfer` for them",
            )
        elif kinds.index(kind) != number:
            complain(number, f"a second `{kind}`: a pipeline has one")


def _check_scaled(stages: tuple[StageConfig, ...], reader: Problems) -> None:
    """An image that was decoded smaller must not be seen by anybody before it is shrunk to its final size."""
    for number, stage in enumerate(stages):
        if getattr(stage.args, "scaled", False):
            rest = (later for later in stages[number + 1 :] if later.kind != "color_jitter")
            following = next(rest, None)
            args = following.args if following is not None else None
            if following is None or following.kind not in ("resize", "random_resized_crop"):
                found = f"`{following.kind}`" if following is not None else "nothing"
                why = f"`resize` or `random_resized_crop` has to come next, and {found} does"
            elif getattr(args, "interpolation", None) != "bilinear" or not getattr(args, "antialias", False):
                why = f"`{following.kind}` has to be bilinear and antialiased"
            elif getattr(args, "fields", None) is not None:
                why = f"`{following.kind}` has to act on all images, and it names `fields`"
            else:
                return
            reader.complain(("stages", number, stage.kind, "scaled"), f"`scaled: true` decodes images smaller: {why}")


_SHRINKING = frozenset({"resize", "center_crop", "random_crop", "random_resized_crop"})


def check_lowered(stages: tuple[StageConfig, ...], reader: Problems) -> None:
    """What DALI is to do instead of our own stages must be something that it can do."""
    first = next(
        (n for n, stage in enumerate(stages) if getattr(stage.args, "device", "cpu") in ("gpu", "dali-cpu")), None
    )
    if first is None:
        return
    decoding = stages[first].args
    device = decoding.device  # type: ignore[attr-defined]
    for name in ("scaled", "masks", "exif_orientation"):
        if getattr(decoding, name):
            reader.complain(("stages", first, "decode", name), f"not with `device: {device}`: use `device: cpu`")
    is_whole = True
    for number, stage in enumerate(stages[first + 1 :], first + 1):
        if stage.kind == "batch":
            return
        describe = STAGES[stage.kind].steps
        if stage.kind == "color_jitter" and is_whole and describe is not None and describe(stage.args).kinds:
            reader.complain(
                ("stages", number),
                "`color_jitter` of whole images may take gigabytes inside DALI: put it behind what crops or resizes them, or "
                "use `decode: {device: cpu}`",
            )
        is_whole = is_whole and stage.kind not in _SHRINKING
        if STAGES[stage.kind].steps is None:
            hint = "put it after `batch`, or " if stage.kind == "call" else ""
            reader.complain(
                ("stages", number), f"`{stage.kind}` cannot run inside DALI: {hint}use `decode: {{device: cpu}}`"
            )
            continue
        key = ("stages", number, stage.kind)
        instead = "`decode: {device: cpu}`"
        interpolation = getattr(stage.args, "interpolation", None)
        named = getattr(stage.args, "fields", None)
        if interpolation == "nearest":
            reader.complain(
                (*key, "interpolation"),
                f"nearest takes other pixels inside DALI: use bilinear or bicubic, or {instead}",
            )
        if interpolation == "bicubic" and not getattr(stage.args, "antialias", True):
            reader.complain(
                (*key, "antialias"), f"bicubic without it is another filter inside DALI: leave it on, or use {instead}"
            )
        if stage.args.workers != "auto":
            reader.complain((*key, "workers"), f"`{stage.kind}` runs inside `decode` here: say there how many")
        if named is not None and set(named) != set(getattr(decoding, "fields", None) or ()):
            reader.complain(
                (*key, "fields"),
                f"DALI does the same to all images that it decodes: name {list(named)} in `decode` as well, or use {instead}",
            )


def _check_fields(source: SourceArgs, stages: tuple[StageConfig, ...], reader: Problems) -> None:
    """Image stages need images, as far as the description tells what the fields are."""
    fields = _declared_fields(source)
    is_bytes = type(source) not in (SOURCES["dataset"], SOURCES["array"])
    for number, stage in enumerate(stages):
        if stage.kind == "decode":
            is_bytes = False
        elif stage.kind == "call":
            fields = None  # it may make anything of anything
            is_bytes = False
        elif STAGES[stage.kind].needs_images:
            wanted = getattr(stage.args, "fields", None)
            if is_bytes:
                reader.complain(
                    ("stages", number), f"`{stage.kind}` needs images, and these are still encoded: put `decode` before"
                )
            elif fields is not None:
                _check_images(number, stage.kind, wanted, fields, reader)


def _check_images(
    number: int, kind: str, wanted: tuple[str, ...] | None, fields: Mapping[str, str], reader: Problems
) -> None:
    for name in wanted or ():
        if name not in fields:
            reader.complain(("stages", number), f"`{kind}` names the field {name!r}; {nearest(name, fields)}")
        elif fields[name] != "image":
            reader.complain(("stages", number), f"`{kind}` acts on images, and {name!r} is {fields[name]}")
    if wanted is None and "image" not in fields.values():
        listed = ", ".join(f"{name} ({what})" for name, what in fields.items())
        reader.complain(("stages", number), f"`{kind}` acts on images, and there is none: the fields are {listed}")


def _declared_fields(source: SourceArgs) -> dict[str, str] | None:
    """field -> image, text, number or bytes, where the description tells; None where only the data can."""
    declared = getattr(source, "fields", None)
    if isinstance(declared, Mapping):
        found = {name: _kind_of(str(extensions).split(";"), IMAGE_EXTENSIONS) for name, extensions in declared.items()}
    else:
        include = getattr(source, "include", None)
        patterns = (include,) if isinstance(include, str) else include or ()
        extensions = [pattern.rpartition(".")[2].lower() for pattern in patterns if "." in pattern]
        if type(source) is not SOURCES["files"] or len(extensions) != len(patterns) or not extensions:
            return None
        if not all(extension.isalnum() for extension in extensions):
            return None
        found = {
            "image" if extension in IMAGE_EXTENSIONS else extension: _kind_of([extension], IMAGE_EXTENSIONS)
            for extension in extensions
        }
    if "several arrays" in found.values():
        return None  # an archive's fields are known when it is read
    if getattr(source, "label", "none") == "parent":
        found["label"] = "a number"
    return found


def _kind_of(extensions: list[str], images: frozenset[str]) -> str:
    last = {extension.strip().lower().rpartition(".")[2] for extension in extensions}
    if last <= images:
        return "image"
    names = {
        "txt": "text",
        "text": "text",
        "json": "JSON",
        "cls": "a number",
        "npy": "an array",
        "npz": "several arrays",
    }
    return names.get(next(iter(last)), "bytes") if len(last) == 1 else "bytes"
