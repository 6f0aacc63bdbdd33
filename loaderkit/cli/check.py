"""`loaderkit check` and `loaderkit explain`: does a pipeline work, and what does it do exactly."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.units import say_count, say_size
from loaderkit.cli.mix import explain_mix
from loaderkit.cli.restore import check_checkpoint
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import (
    AsJson,
    Assignments,
    Debug,
    PipelineFile,
    checkpoint_config,
    described,
    open_plan,
)
from loaderkit.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from loaderkit.engine.metrics.tuning import Tuning
    from loaderkit.engine.work import Stage
    from loaderkit.pipeline.config.model import PipelineConfig
    from loaderkit.pipeline.execution_plan import ExecutionPlan

_NUM_CLASSES_SHOWN = 5
_NUM_LACKING_LISTED, _NUM_LACKING_SHOWN = 100, 3
_MUCH_DECODED = 1.5  # times the bytes of an epoch


def check(
    pipeline: PipelineFile, assignments: Assignments = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Validate pipeline P, list its source and make one batch; say what is in it."""
    if (config := checkpoint_config(pipeline, assignments)) is not None:
        check_checkpoint(config, as_json)
        return
    checked = checked_pipeline(pipeline, assignments)
    if as_json:
        console.tell_json(checked)
    else:
        _tell_check(checked)


def checked_pipeline(pipeline: Path | Mapping[str, Any], assignments: Assignments = None) -> dict[str, Any]:
    """What the check of a pipeline's file, or of its mapping, finds, as it stands in the JSON. Raises LoaderkitError."""
    prefetch = described(pipeline, assignments).prefetch
    if prefetch.is_remote:
        from loaderkit.pipeline.executors.process_setup import check_depth  # late, as torch is

        check_depth(prefetch)
    # A batch of the real size: a sample alone would hide that others have other shapes, or that memory is too small.
    plan = open_plan(pipeline, [*(assignments or []), "prefetch.batches=1"], on_this_thread=True)
    checked = {
        "pipeline": plan.config.name,
        "executor": prefetch.executor,
        **_lengths(plan),
        "batch_size": plan.config.batch_size,
        "batch_tokens": plan.config.batch.tokens,
        "rank": plan.schedule.rank,
        "world_size": plan.schedule.world_size,
        "num_listed": None if plan.config.kind.is_stream else len(plan.source),
        "extensions": _extensions(plan.config),
        "classes": plan.source.classes,
        "first_sample": _first_sample(plan),
        "num_ignored_members": getattr(plan.source, "num_ignored", 0),
        "left_out": dict(getattr(plan.source, "left_out", {})),
        "null_columns": getattr(plan.source, "null_columns", []),
        "num_of_systems": getattr(plan.source, "num_of_systems", 0),
        "class_oddities": plan.source.oddities(),
        "bad_shards": [shard._asdict() for shard in plan.source.bad_shards],
        "lacking": _lacking(plan),
        **_first_batch(plan),
        **_row_groups(plan),
    }
    checked |= plan.config.kind.check_items(plan.config.source, plan.source)
    checked["side_by_side"] = _side_by_side(plan)
    return checked


def _extensions(config: PipelineConfig) -> list[dict[str, str]]:
    """{"what", "name", "origin"} of what the pipeline uses that loaderkit does not bring. Raises ConfigError for a name
    of ours that a package claims, too."""
    from loaderkit.pipeline.config.extensions import used_extensions

    return [extension._asdict() for extension in used_extensions(config, all_claims=True)]


def _said_of_extension(extension: dict[str, str]) -> str:
    return f"{extension['what']} {extension['name']}, of {extension['origin']}"


def _lengths(plan: ExecutionPlan) -> dict[str, Any]:
    """`resume`: how an iterable gets to a saved position; None for other sources. The numbers are None if they are not
    known in advance; `may_have_fewer`: batches may be skipped."""
    schedule, in_order, resume = plan.schedule, plan.source.in_order, None
    if in_order is not None:
        resume = "its own state, as exact as that is" if in_order.has_state else "iterating up to there"
    if not schedule.knows_length:
        return {"num_samples": None, "batches_per_epoch": None, "resume": resume, "may_have_fewer": False}
    return {
        "num_samples": plan.num_samples(),
        "batches_per_epoch": schedule.num_batches(),
        "resume": resume,
        "may_have_fewer": plan.config.skips_empty_batches,
    }


def _row_groups(plan: ExecutionPlan) -> dict[str, Any]:
    """`row_groups`, for a source of rows: the number of its row groups, their bytes, and how often this rank decodes
    the bytes of its samples."""
    from loaderkit.sources.forecast import decoded_share

    groups, schedule, share = plan.source.row_groups, plan.schedule, None
    if groups is None:
        return {}
    if plan.order.unit == "samples":  # else samples come in another order than the source's
        share = decoded_share(groups, len(plan.source), plan.order.core, schedule.rank, schedule.world_size)
    return {
        "row_groups": {
            "num": len(groups.group_bytes),
            "mean_bytes": int(groups.group_bytes.mean()),
            "num_bytes": int(groups.group_bytes.sum()),
            "decoded_share": share,
            "shuffle": plan.config.order.shuffle,
        }
    }


def _said_of_row_groups(facts: dict[str, Any]) -> Iterator[str]:
    size, share = say_size(facts["mean_bytes"]), facts["decoded_share"]
    yield f"{say_count(facts['num'], 'row group')} of {size} on average, decoded"
    if share is None or share < _MUCH_DECODED:
        return
    remedy = (
        "write smaller row groups, or raise `source.memory`"
        if facts["shuffle"] == "none"
        else "set `order: {shuffle: block}`, whose blocks are row groups, raise `source.memory`, or write smaller row groups"
        if facts["shuffle"] == "global"
        else "make `window` or `lanes` of `order.block` smaller, whose product is how many blocks are mixed, or raise "
        "`source.memory`"
    )
    total = say_size(share * facts["num_bytes"])
    yield (
        f"an epoch decodes every row group {share:.3g} times ({total} instead of {say_size(facts['num_bytes'])}, all ranks "
        f"together), as samples of more row groups are mixed than memory holds, or several ranks need the same: {remedy}"
    )


def _side_by_side(plan: ExecutionPlan) -> dict[str, Any] | None:
    """What several threads at once make differently than one thread does; None if they make the same, or run no user code."""
    from loaderkit.pipeline.thread_checks import compare_side_by_side

    found = compare_side_by_side(plan)
    return None if found is None or not (found.fields or found.error) else found._asdict()


def _said_of_threads(found: dict[str, Any]) -> str:
    """What that means, by what is declared."""
    values = f"other values in {', '.join(found['fields'])}" if found["fields"] else "an error"
    why = f" ({found['error']})" if found["error"] else ""
    where = f"made in several threads at once, samples had {values}{why}"
    if found["declared"]:
        return (
            f"{where}: take `thread_safe: true` from {', '.join(found['declared'])}, or mend what they share; "
            "a kind of another package that is not for several threads says `runs_user_code`"
        )
    return f"{where}; one item at a time runs in each process, so do not declare {', '.join(found['stages'])}"


def _first_batch(plan: ExecutionPlan) -> dict[str, Any]:
    """{"fields": [{name, dtype, shape}], ...} of the first batch; a shape is one sample's. `draws_unseeded`: which
    stages drew from which of the process's generators. `changed_fields`: fields that differed when the batch was made
    again."""
    from loaderkit._internal.compare import differ
    from loaderkit.loader import Loader
    from loaderkit.pipeline.config.registry import STAGES
    from loaderkit.pipeline.delivery.bad_samples import BadSamples

    BadSamples(plan.config.errors)  # raises for a quarantine file that cannot be written ...
    errors = plan.config.errors.model_copy(update={"quarantine": None})  # ... but looking is not to write to it
    plan = replace(plan, config=replace(plan.config, errors=errors))
    drawn: dict[str, list[str]] = {}
    for number, stage in enumerate(plan.compiled.stages):
        runs_others_code = STAGES[stage.kind].runs_user_code or not STAGES.is_ours(stage.kind)
        if runs_others_code or (stage.kind == "read" and plan.connector is None):  # a data set's
            plan.compiled.stages[number] = _watched(stage, drawn)

    def first_fields(loader: Loader) -> Mapping[str, Any]:
        batch = next(iter(loader))
        return batch if isinstance(batch, Mapping) else dict(zip(plan.config.output or (), batch, strict=True))

    with Loader(plan) as loader:
        begin = loader.state_dict()
        fields = first_fields(loader)
        described = [describe_field(name, value) for name, value in fields.items()]
        stats = loader.stats()
        num_bad = sum(stage.num_failed for stage in stats.stages)
        changed: list[str] = []
        if not num_bad:  # or they would be reported twice
            loader.load_state_dict(begin)
            again = first_fields(loader)
            changed = [name for name, value in fields.items() if differ(value, again.get(name))]
    return {
        "fields": described,
        "num_bad_in_first_batch": num_bad,
        "num_dropped_for_first_batch": stats.num_dropped,
        "num_tried_for_first_batch": stats.num_samples + stats.num_dropped,
        "draws_unseeded": drawn,
        "changed_fields": changed,
    }


def _watched(stage: Stage, drawn: dict[str, list[str]]) -> Stage:
    """The stage, which notes the process's generators that it draws from. No other thread may draw meanwhile."""
    from loaderkit.sampling.global_generators import global_states

    def run(*args: Any) -> Any:
        before = {name: pickle.dumps(state) for name, state in global_states().items()}
        result = stage.run(*args)
        if after := [name for name, state in global_states().items() if pickle.dumps(state) != before[name]]:
            drawn[stage.name] = sorted({*drawn.get(stage.name, ()), *after})
        return result

    return replace(stage, run=run)


def describe_field(name: str, value: Any) -> dict[str, Any]:
    """Name, dtype and shape of one field for one sample; a list's dtype is the type of its first item."""
    import torch

    if isinstance(value, torch.Tensor):
        return {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[1:])}
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return {"name": name, "dtype": type(first).__name__, "shape": None}


def _first_sample(plan: ExecutionPlan) -> dict[str, Any]:
    """Key, origin and size in bytes (None if the source has no bytes, or not all of its fields) of the first sample in
    canonical order."""
    source, num_bytes = plan.source, None
    with suppress(SourceError):  # a field is missing, which the batch that it is in says
        num_bytes = sum(sample_range.range.length for sample_range in source.ranges(0)) if source.has_ranges else None
    return {"key": source.key(0), "origin": source.origin(0), "num_bytes": num_bytes}


def _lacking(plan: ExecutionPlan) -> list[dict[str, Any]]:
    """The fields that some samples lack, as the index of the source has it: how many, and the keys of the first."""
    source, found = plan.source, []
    for field, indices in source.lacking().items():
        keys = source.keys(indices[:_NUM_LACKING_LISTED])
        found.append({"field": field, "num": len(indices), "keys": keys, "origin": source.origin(int(indices[0]))})
    return found


def _said_of_lacking(checked: dict[str, Any]) -> Iterator[str]:
    for one in checked["lacking"]:
        named = ", ".join(one["keys"][:_NUM_LACKING_SHOWN])
        more = ", ..." if one["num"] > _NUM_LACKING_SHOWN else ""
        yield f"{one['num']} of {checked['num_listed']} samples have no {one['field']}: {named}{more}, from {one['origin']}"


def _left_out(checked: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows on what is there and is no sample."""
    rows = []
    if checked["num_ignored_members"]:
        rows.append(("ignored", f"{checked['num_ignored_members']} tar members: hidden, or without an extension"))
    if left_out := checked["left_out"]:
        from loaderkit.sources.listing import said_counts

        rows.append(
            ("left out", f"{sum(left_out.values())} files that `include` does not take: {said_counts(left_out)}")
        )
    rows += [("left out", f"the column {name!r}, which has nothing but nulls") for name in checked["null_columns"]]
    if checked["num_of_systems"]:
        rows.append(
            (
                "left out",
                f"{checked['num_of_systems']} files in folders that a NAS or a system leaves behind (as @eaDir)",
            )
        )
    return rows


def _tell_check(checked: dict[str, Any]) -> None:
    from loaderkit.sources.bad_shards import BadShard

    first, classes = checked["first_sample"], checked["classes"]
    rows = [
        ("samples", _samples(checked)),
        ("batches", _batches(checked)),
    ]
    rows += [("extension", _said_of_extension(extension)) for extension in checked["extensions"]]
    if checked["executor"] == "ray":
        rows.append(
            ("executor", "ray, not tried: what nodes lack (files, modules) shows in `loaderkit run --batches 20`")
        )
    if checked["resume"]:
        rows.append(("resume", f"by {checked['resume']}; every rank and loading process iterates over all of it"))
    if checked.get("state_is_inexact"):
        rows.append(
            (
                "state",
                "not exact: what was resumed from it gave other items than come next, as a shuffle buffer does that is not "
                "in the state. Set `resume: skip`",
            )
        )
    if classes is not None:
        more = ", ..." if len(classes) > _NUM_CLASSES_SHOWN else ""
        rows.append(("classes", f"{len(classes)}: {', '.join(classes[:_NUM_CLASSES_SHOWN])}{more}"))
    rows += [("classes", said) for said in checked["class_oddities"]]
    rows += (
        [("row groups", said) for said in _said_of_row_groups(checked["row_groups"])] if "row_groups" in checked else []
    )
    size = "" if first["num_bytes"] is None else f", {first['num_bytes']} bytes"
    rows.append(("first sample", f"{first['key']}{size}"))
    rows += [("field", said) for said in said_of_fields(checked)]
    rows += _left_out(checked)
    rows += [("bad shard", str(BadShard(**shard))) for shard in checked["bad_shards"]]
    rows += [("lacking", said) for said in _said_of_lacking(checked)]
    if checked["num_bad_in_first_batch"]:
        rows.append(("bad", f"{checked['num_bad_in_first_batch']} samples tried for the first batch"))
    if num_dropped := checked["num_dropped_for_first_batch"]:
        rows.append(
            ("dropped", f"{num_dropped} of {checked['num_tried_for_first_batch']} samples tried for the first batch")
        )
    rows += [("random", said) for said in _said_of_randomness(checked)]
    if checked["side_by_side"]:
        rows.append(("threads", _said_of_threads(checked["side_by_side"])))
    console.tell(f"{checked['pipeline']}: it works")
    for name, value in rows:
        console.tell(f"  {name:<14}{value}")


def said_of_fields(checked: dict[str, Any]) -> list[str]:
    """The fields of a batch: "image: float32 3x224x224", with the shape of a sample."""
    shapes = ["" if field["shape"] is None else f" {_shape(field['shape'])}" for field in checked["fields"]]
    return [f"{field['name']}: {field['dtype']}{shape}" for field, shape in zip(checked["fields"], shapes, strict=True)]


def _said_of_randomness(checked: dict[str, Any]) -> Iterator[str]:
    """What would differ in another run, or on another rank."""
    lost = "would repeat some and leave out others"
    items_differ = checked.get("items_differ", False)
    if items_differ or checked.get("is_unseeded"):
        found = "two passes of one epoch gave other items" if items_differ else "it shuffles without a seed"
        yield f"{found}: several ranks or processes, and a resumed epoch, {lost}. Shuffle and draw by a seed and the epoch"
    elif not checked.get("seen_alike", True):
        found = "another process saw other items, as of a set, or shuffled without a seed"
        yield f"{found}: several ranks, and a resumed run, {lost}. Sort them, or shuffle by a seed"
    if checked["changed_fields"] and not checked["draws_unseeded"] and not items_differ:
        found = f"made again, the first batch had other values in {', '.join(checked['changed_fields'])}"
        yield (
            f"{found}: a function, or the data set, has a generator of its own, or counts its calls. Draw from `rng`, in a "
            "`call` that takes it"
        )
    for stage, generators in checked["draws_unseeded"].items():
        remedy = "a `call` with `seeded: true`, or in one that takes `rng`"
        draws = f"{stage} draws from global generators ({', '.join(generators)}), so batches differ from run to run"
        yield f"{draws}: draw in {remedy}"


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) if shape else "(a number)"


def _samples(facts: dict[str, Any]) -> str:
    unknown = "not known before the iterable ends" if facts["resume"] else "no end (mix.stop: never)"
    return unknown if facts["num_samples"] is None else str(facts["num_samples"])


def _batches(facts: dict[str, Any]) -> str:
    ranks = " on one rank" if facts["world_size"] == 1 else f" on rank {facts['rank']} of {facts['world_size']}"
    number = "any number" if facts["batches_per_epoch"] is None else facts["batches_per_epoch"]
    most = "at most " if facts["may_have_fewer"] else ""
    size = (
        f"of up to {facts['batch_tokens']} tokens"
        if facts["batch_size"] is None
        else f"batch size {facts['batch_size']}"
    )
    return f"{most}{number} per epoch{ranks}, {size}"


def explain(
    pipeline: PipelineFile,
    assignments: Assignments = None,
    mix: Annotated[
        bool,
        typer.Option("--mix", help="Print what each of `sources` gives until it is used up, or the weights change."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print pipeline P with every default filled in, and the pools of workers it will run in: YAML that can be run."""
    of_tensors = checkpoint_config(pipeline, assignments)
    if of_tensors is not None and mix:
        raise ConfigError(f"explain --mix: {of_tensors.name} is a checkpoint, and has no samples to mix")
    if of_tensors is not None:
        if as_json:
            console.tell_json({"pipeline": of_tensors.name, "config": of_tensors.to_dict(defaults=True)})
        else:
            console.tell(f"# {of_tensors.name}, with every default filled in")
            console.tell(of_tensors.to_yaml(defaults=True).rstrip())
        return
    from loaderkit.pipeline.executors.engine_factory import describe_tuning

    with closing(open_plan(pipeline, assignments)) as plan:
        if mix:
            explain_mix(plan, as_json)
            return
        tuning = describe_tuning(plan)
        explained = _explained(plan, tuning)
    if as_json:
        console.tell_json(explained)
    else:
        _tell_explained(explained, plan.config, tuning)


def _explained(plan: ExecutionPlan, tuning: Tuning) -> dict[str, Any]:

    return {
        "pipeline": plan.config.name,
        "url": getattr(plan.config.source, "url", None),
        **_lengths(plan),
        "batch_size": plan.config.batch_size,
        "batch_tokens": plan.config.batch.tokens,
        "rank": plan.schedule.rank,
        "world_size": plan.schedule.world_size,
        "num_cpus": num_cpus(),
        "extensions": _extensions(plan.config),
        "tuning": tuning.to_dict(),
        "config": plan.config.to_dict(defaults=True),
    }


def _tell_explained(explained: dict[str, Any], config: PipelineConfig, tuning: Tuning) -> None:
    console.tell(f"# {config.name}, with every default filled in")
    if explained["url"] is not None:
        console.tell(f"# source    {explained['url']}")
    for extension in explained["extensions"]:
        console.tell(f"# extension {_said_of_extension(extension)}")
    console.tell(f"# samples   {_samples(explained)}")
    console.tell(f"# batches   {_batches(explained)}")
    of_cluster = ""
    if tuning.executor == "ray":
        each = config.prefetch.ray.num_cpus
        of_cluster = f" here; of the Ray cluster {each:g} for {'the actor' if tuning.processes == 1 else 'each actor'}"
    console.tell(f"# CPUs      {explained['num_cpus']}{of_cluster}")
    several = f"{tuning.processes} times " if (tuning.processes or 1) > 1 else ""
    console.tell(f"# executor  {several}{tuning.executor}, {tuning.batches} batches ahead")
    for pool in tuning.pools:
        workers = f"{pool.workers} worker{'s' if pool.workers > 1 else ''}"
        here = ", in the process that trains" if pool.is_trainers else ""
        console.tell(f"# pool      {workers}{here}: {' > '.join(pool.stages)}")
    if tuning.jpeg is not None:
        without = (
            "whole: for the crop alone loaderkit.native._jpeg is missing, which wants libjpeg-turbo and its headers"
        )
        console.tell(f"# JPEGs     decoded: {without if tuning.jpeg == 'whole' else tuning.jpeg}")
    for line in tuning.graph:
        console.tell(f"# DALI      {line}")
    console.tell(config.to_yaml(defaults=True).rstrip())
