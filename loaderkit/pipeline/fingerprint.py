"""Computes what distinguishes one pipeline from another: for a saved state, and for the name under which its samples'
lengths are kept."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch

from loaderkit._internal.compare import differ
from loaderkit.errors import USER_ERRORS
from loaderkit.pipeline.config.mixture import MixedSourceConfig, MixtureArgs
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.sampling.order import SampleOrder
from loaderkit.sources.bad_shards import names_of
from loaderkit.sources.base import Source, shortened
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import StageConfig
from loaderkit.stages.batch import BatchArgs

_ARRAYS = (np.ndarray, torch.Tensor)


def arguments_of(stage: StageConfig, *, of: Literal["bytes", "lengths"]) -> dict[str, Any]:
    """The arguments of a stage that decide what it makes of a sample. In stages of other packages, arrays and tensors
    are described by their values; those in `args` of `call` by their class, as in states saved by earlier versions.

    For the `bytes` of a delivered sample, arguments that only refuse samples do not matter. Arguments at their defaults
    are left out, so that a release may add one, and so is `name`, which is kept separately. For the `lengths` of all
    samples, a refused sample has 0, and any new argument makes them be measured again.
    """
    kind, told = STAGES[stage.kind], _as_it_is if STAGES.is_ours(stage.kind) else _told
    left_out, contents = kind.args_of_speed | {"workers"}, kind.contents(stage.args)
    all_given = {name: contents.get(name, value) for name, value in stage.args}
    if of == "lengths":
        return {name: told(value) for name, value in all_given.items() if name not in left_out}
    left_out |= kind.args_of_refusal | {"name"}
    given = {name: value for name, value in all_given.items() if name not in left_out}
    defaults = type(stage.args).model_fields
    return {name: told(value) for name, value in given.items() if not _is_same(value, defaults[name].default)}


def _is_same(value: Any, default: Any) -> bool:
    try:
        return not differ(value, default) if isinstance(value, _ARRAYS) else bool(value == default)
    except USER_ERRORS:  # containers of arrays, and tables, have no one truth value
        return False


def _as_it_is(value: Any) -> Any:
    return value


def _told(value: Any) -> Any:
    """An array or a tensor, also in containers, as its type, its shape and a digest of its values."""
    if isinstance(value, dict):
        return {key: _told(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().resolve_conj().resolve_neg().flatten()
        data = flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        data = text_of(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    else:
        return value
    return f"{value.dtype} {list(value.shape)} {blake2b(data, digest_size=8).hexdigest()}"


def text_of(values: Any) -> str:
    """JSON text of arguments. Functions and classes are in it by their names, other objects by the name of their class."""
    return json.dumps(values, sort_keys=True, default=_name_of)


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def fingerprint_of(config: PipelineConfig, source: Source, order: SampleOrder) -> dict[str, str]:
    """The values that must be equal for a saved state to mean the same samples; not the URL or settings of speed."""
    digests, shuffle, block = order.digests(), config.order.shuffle, config.order.block
    values = _of_sources(config, source)
    if "mix" in digests:
        values["mix"] = digests.pop("mix")
    if source.bad_shards:
        values["bad_shards"] = names_of(source.bad_shards)
    values["order"] = (
        f"block of {block.block} bytes, window {block.window}, lanes {block.lanes}" if shuffle == "block" else shuffle
    )
    if config.order.weights is not None:
        values["order"] = f"weights {text_of(config.order.weights)}"
    values["stages"] = " > ".join(stage.name for stage in config.stages if stage.kind != "transfer")
    values |= digests
    if order.unit == "batches":
        values["batches"] = _of_batches(config.batch)
    if source.classes is not None:
        values["classes"] = shortened(source.classes)
    if named := config.source.model_dump(mode="python", include={"fields", "label"}, exclude_none=True):
        values["fields"] = json.dumps(named, sort_keys=True, default=list)
    for stage in config.stages:
        if stage.kind not in ("read", "batch", "transfer"):
            values[f"stages.{stage.name}"] = _of_stage(stage)
    return values


def _of_sources(config: PipelineConfig, source: Source) -> dict[str, str]:
    if not isinstance(config.source, MixtureArgs):
        size = "" if config.kind.is_stream else f" of {len(source)} samples"
        return {"data": f"{config.source_kind}{size}, digest {source.fingerprint()}"}
    assert isinstance(source, MixtureSource)
    pairs = zip(config.source.members, source.parts, strict=True)
    return {"sources": " ".join(_of_member(config.source, member, part) for member, part in pairs)}


def _of_member(args: MixtureArgs, member: MixedSourceConfig, part: Source) -> str:
    """The fingerprint of one source of a mixture. It is short, as a state with 20 sources should stay below 1 KiB."""
    named = member.args.model_dump(mode="python", include={"fields", "label"}, exclude_none=True)
    values = (
        member.kind,
        part.fingerprint(),
        part.classes,
        sorted(named.items()),
        args.num_passes(member),
        *map(_of_stage, member.stages),
    )
    digest = blake2b(repr(values).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{member.name}:{len(part)}:{digest}"


def _of_batches(args: BatchArgs) -> str:
    form: str = args.forms.get(args.field, "pad")
    form += f" to multiples of {args.pad_to_multiple_of}" * (args.pad_to_multiple_of is not None)
    return f"{args.tokens} tokens of {args.field!r}, {form}, window {args.window}, cost {args.cost}"


def _of_stage(stage: StageConfig) -> str:
    return f"{stage.kind} {text_of(arguments_of(stage, of='bytes'))}"
