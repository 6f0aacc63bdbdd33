"""Checks that the stages of a pipeline fit together and fit the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest
from loaderkit.connectors.config import SourceArgs
from loaderkit.pipeline.config.mixture import MixedSourceConfig, MixtureArgs
from loaderkit.pipeline.config.model import ErrorsArgs, OrderArgs, PrefetchArgs
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.sources.base import SourceKind
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.batch import BatchArgs


def check_structure(
    source: SourceArgs,
    stages: tuple[StageConfig, ...],
    order: OrderArgs | None,
    prefetch: PrefetchArgs | None,
    problems: Problems,
) -> None:
    """Add errors for stages that are missing, misplaced, get input that they cannot take, or cannot run in this executor."""
    if not stages:
        return
    if not isinstance(source, MixtureArgs):
        paths: list[KeyPath] = [("stages", number) for number in range(len(stages))]
        _check_one(source, stages, paths, (order, prefetch), problems)
        return
    for number, member in enumerate(source.members):
        if not _check_own(member, ("sources", number, "stages"), problems):
            continue
        # What its samples go through: `read`, its own stages, and the others.
        together = (stages[0], *member.stages, *stages[1:])
        own: list[KeyPath] = [("sources", number, "stages", place) for place in range(len(member.stages))]
        paths = [("stages", 0), *own, *(("stages", place) for place in range(1, len(stages)))]
        _check_one(member.args, together, paths, (order, prefetch), problems)


def _check_own(member: MixedSourceConfig, path: KeyPath, problems: Problems) -> bool:
    """Check that a source's own stages are sample stages and run in the workers of `read`; False if one is no sample
    stage."""
    are_sample_stages = True
    for number, stage in enumerate(member.stages):
        where = (*path, number)
        if stage.kind == "read" or STAGES[stage.kind].scope in ("boundary", "batch"):
            problems.error(
                where, f"`{stage.kind}` belongs to the common `stages`: a source has sample stages of its own"
            )
            are_sample_stages = False
        elif STAGES[stage.kind].expands:
            problems.error(
                where, f"`{stage.kind}` belongs to the common `stages`: as many samples are made of one of each source"
            )
        elif stage.args.workers != "auto":
            problems.error(
                (*where, stage.kind, "workers"),
                "a source's own stages run in the workers of `read`: set it there, in the common `stages`",
            )
        elif stage.kind == "decode" and getattr(stage.args, "device", "cpu") != "cpu":
            problems.error(
                (*where, stage.kind, "device"),
                "DALI takes whole batches: put `decode` into the common `stages`, or use `device: cpu`",
            )
    return are_sample_stages


def _check_one(
    source: SourceArgs,
    stages: tuple[StageConfig, ...],
    paths: Sequence[KeyPath],
    settings: tuple[OrderArgs | None, PrefetchArgs | None],
    problems: Problems,
) -> None:
    """Check the stages of one source; `paths` are their keys."""
    order, prefetch = settings
    kinds = [stage.kind for stage in stages]
    add_error = _error_adder(stages, problems, paths)
    if kinds[0] != "read":
        if "read" in kinds:
            add_error(kinds.index("read"), "`read` must be the first stage")
        else:
            add_error(0, "the first stage must be `read`, which is missing")
    source_kind = SOURCES[source.kind]
    if not source_kind.has_samples:
        _check_restore(kinds, add_error)
        return
    if "batch" not in kinds:
        add_error(len(kinds) - 1, "no `batch` stage: samples must be gathered into batches, e.g. `- batch: {size: 64}`")
        return
    _check_places(kinds, add_error)
    _check_fields(source_kind, source, stages, add_error)
    check_neighbours(stages, problems, paths)
    for number, stage in enumerate(stages):
        if source_kind.is_stream:
            _check_of_stream(number, stage, add_error)
        if prefetch is not None and prefetch.executor == "thread" and getattr(stage.args, "seeded", False):
            add_error(
                number,
                "threads of the process that trains share its generators: set `prefetch: {executor: process}` (or inline), or "
                "let the function take `rng` instead",
                "seeded",
            )
        is_on_gpu = stage.kind == "decode" and getattr(stage.args, "device", None) == "gpu"
        if prefetch is not None and prefetch.is_remote and is_on_gpu:
            add_error(
                number,
                "another process cannot hand over tensors on a GPU: set `prefetch: {executor: thread}`",
                "device",
            )
    if prefetch is not None and prefetch.is_remote and prefetch.processes == "auto" and source_kind.is_stream:
        problems.error(
            ("prefetch", "processes"),
            "auto lets processes join while the loop runs, and each would have to iterate over all that an iterable has given "
            "before: give their number",
        )
    if order is not None:
        _check_order(order, source.kind, problems)


def _check_order(order: OrderArgs, kind: str, problems: Problems) -> None:
    if order.weights is not None and order.shuffle != "global":
        problems.error(("order", "weights"), "what is drawn by weight may come at any place: use `shuffle: global`")
    if order.shuffle == "block" and not SOURCES[kind].has_blocks:
        problems.error(
            ("order", "shuffle"),
            "block needs a source that knows where its bytes lie, such as files, tar and array, and a source of kind "
            f"{kind!r} does not: use global or none",
        )


def _check_of_stream(number: int, stage: StageConfig, add_error: AddError) -> None:
    """Check stages that need to know lengths: an iterable's length, and its items' lengths, are known only when it is
    read."""
    if STAGES[stage.kind].packs:
        add_error(
            number,
            f"`{stage.kind}` plans by the lengths of all documents, and of an iterable they show only when it is read: use "
            "another kind of source",
        )
    if STAGES[stage.kind].expands:
        add_error(
            number,
            f"`{stage.kind}` counts the samples that it makes, and how many an iterable has shows when it ends: let the "
            "iterable give them, or use another kind of source",
        )
    if isinstance(stage.args, BatchArgs) and stage.args.tokens is not None:
        add_error(
            number,
            "batches of `tokens` are planned by the lengths of all samples, and of an iterable they show only when it is "
            "read: use `size`, or another kind of source",
            "tokens",
        )


def order_of_stream(order: OrderArgs, errors: ErrorsArgs | None, problems: Problems) -> OrderArgs:
    """The order of a source whose items come in their own order only; adds errors for what needs another."""
    if "shuffle" in order.model_fields_set and order.shuffle != "none":
        problems.error(
            ("order", "shuffle"),
            "an iterable's items come in its own order: leave this out or use none, and shuffle in the iterable (its "
            "`set_epoch`, if it has one, is called with each epoch)",
        )
    if order.weights is not None:
        problems.error(("order", "weights"), "an iterable's items come in its own order: leave this out")
    if errors is not None and errors.on_bad_sample == "replace":
        problems.error(
            ("errors", "on_bad_sample"),
            "an iterable has no other sample at hand to put in its place: use skip or raise",
        )
    return order.model_copy(update={"shuffle": "none"})


def _error_adder(
    stages: tuple[StageConfig, ...], problems: Problems, paths: Sequence[KeyPath] | None = None
) -> AddError:
    def add_error(number: int, message: str, argument: str | None = None) -> None:
        path: KeyPath = ("stages", number) if paths is None else paths[number]
        problems.error(path if argument is None else (*path, stages[number].kind, argument), message)

    return add_error


def check_neighbours(
    stages: tuple[StageConfig, ...], problems: Problems, paths: Sequence[KeyPath] | None = None
) -> None:
    """Add errors for stages whose arguments do not fit the stages around them; `paths` are their keys, if not `stages`."""
    add_error = _error_adder(stages, problems, paths)
    for number, stage in enumerate(stages):
        check = STAGES[stage.kind].check
        if check is not None:
            check(stages, number, STAGES, add_error)


def _check_places(kinds: list[str], add_error: AddError) -> None:
    border = kinds.index("batch")
    for number, name in enumerate(kinds):
        kind = STAGES[name]
        if kind.is_single and kinds.index(name) != number:
            add_error(number, f"a second `{name}`: a pipeline has one")
        elif kind.scope == "batch" and number < border:
            add_error(number, f"`{name}` acts on batches: put it after `batch`")
        elif kind.scope == "sample" and number > border:
            add_error(number, f"`{name}` acts on single samples: put it before `batch`")


def _check_restore(kinds: list[str], add_error: AddError) -> None:
    """Check that a checkpoint's pipeline has only `read` and `transfer`."""
    for number, kind in enumerate(kinds):
        if not STAGES[kind].takes_tensors:
            add_error(
                number,
                f"`{kind}` acts on samples: of a checkpoint there are tensors, and `read` and `transfer` for them",
            )
        elif kinds.index(kind) != number:
            add_error(number, f"a second `{kind}`: a pipeline has one")


def _check_fields(
    source_kind: SourceKind, source: SourceArgs, stages: tuple[StageConfig, ...], add_error: AddError
) -> None:
    """Check that image stages get images, as far as the description says what the fields are."""
    fields = source_kind.fields(source)
    is_encoded = source_kind.encoded == "all"
    for number, stage in enumerate(stages):
        kind = STAGES[stage.kind]
        if kind.decodes:
            is_encoded = False
            if fields is not None:
                _check_annotations(number, stage, fields, add_error)
                fields = _with_arrays(fields, stage.args)
            if fields is not None and getattr(stage.args, "video", None) is not None:
                fields = {name: "image" if what == "video" else what for name, what in fields.items()}
        elif kind.needs_images:
            named = getattr(stage.args, "fields", None)
            if is_encoded:
                add_error(number, f"`{stage.kind}` needs images, and these are still encoded: put `decode` before")
            elif fields is not None:
                _check_images(number, stage.kind, named, fields, add_error)
        if not kind.is_contained and stage.kind != "filter":
            fields = None  # it may make any fields
            is_encoded = False


def _check_annotations(number: int, decode: StageConfig, fields: Mapping[str, str], add_error: AddError) -> None:
    """Check that there are the fields that `decode` is told to take for masks, boxes and keypoints: a mask by another name
    would be a picture."""
    for argument in ("masks", "instance_masks", "boxes", "keypoints"):
        for name in getattr(decode.args, argument, None) or ():
            if name not in fields:
                add_error(number, f"it names the field {name!r}; {nearest(name, fields)}", argument)


def _with_arrays(fields: Mapping[str, str], decode: StageArgs) -> Mapping[str, str]:
    """The contents of the fields, where `decode` may make images of arrays."""
    masks = getattr(decode, "masks", None) or ()
    is_any = getattr(decode, "takes_arrays", False)
    return {
        name: "image" if what == "an array" and (is_any or name in masks) else what for name, what in fields.items()
    }


def _check_images(
    number: int, kind: str, named: tuple[str, ...] | None, fields: Mapping[str, str], add_error: AddError
) -> None:
    for name in named or ():
        if name not in fields:
            add_error(number, f"`{kind}` names the field {name!r}; {nearest(name, fields)}")
        elif fields[name] != "image":
            hint = ": `decode: {video: ...}` makes clips of it" if fields[name] == "video" else ""
            add_error(number, f"`{kind}` acts on images, and {name!r} is {fields[name]}{hint}")
    if named is None and "image" not in fields.values():
        listed = ", ".join(f"{name} ({what})" for name, what in fields.items())
        add_error(number, f"`{kind}` acts on images, and there is none: the fields are {listed}")
