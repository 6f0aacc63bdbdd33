"""What a few samples hold: each is read and decoded, and the kinds and shapes of its values are noted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from loaderkit.cli.init.kinds import FoundSource
from loaderkit.errors import SourceError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.run_samples import chunk_of
from loaderkit.samples.values import Encoded, Image, Pictures
from loaderkit.sources.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from loaderkit.stages.read import values_reader
from loaderkit.stages.runner import raise_store_failure
from loaderkit.stages.values import shape_and_dtype

_NUM_LISTED, _NUM_READ = 256, 8
_MOST_BYTES = 64 << 20  # of what is read of them; the first is read whatever its size


class Seen(NamedTuple):
    """One value: what it is, and for numbers and arrays its shape and dtype."""

    kind: str  # picture, mask, pictures, video, audio, array, number, chat, text, or other
    shape: tuple[int, ...] = ()
    dtype: str = ""


class SeenSamples(NamedTuple):
    """The values of some samples by field, whether `decode` made them of bytes, and how many samples there are: at most
    256 are listed."""

    fields: dict[str, list[Seen]]
    is_encoded: bool
    num: int
    num_tokens: int  # of all these, where the source knows it


def see_samples(found: FoundSource) -> SeenSamples:
    """Raises LoaderkitError, also if no sample that is tried can be read."""
    decode = {"decode": {"masks": list(found.masks)}} if found.masks else "decode"
    section = {**found.section, "limit": _NUM_LISTED}
    stages = ["read", decode, {"batch": {"size": 1}}]
    prefetch = {"executor": "inline"}  # nothing is read ahead
    config = to_config({"source": section, "stages": stages, "prefetch": prefetch})
    fields: dict[str, list[Seen]] = {}
    errors: list[Exception] = []
    num_bytes, is_encoded = 0, False
    with _without_warnings(), closing(compile_pipeline(config, rank=0, world_size=1)) as plan:
        num, context = len(plan.source), plan.compiled.context
        num_tokens = 0 if plan.source.lengths is None else int(plan.source.lengths.sum())
        reader = values_reader(context.stages[0], context)
        with closing(reader):
            for index in np.linspace(0, num - 1, min(num, _NUM_READ)).astype(np.int64):
                if fields and num_bytes > _MOST_BYTES:
                    break
                chunk = chunk_of(np.array([index], np.int64))
                chunk.scratch = {}
                num_bytes += reader.read(chunk)
                read = dict(chunk.samples[0] or {})
                if not chunk.failures:
                    plan.compiled.stages[1].run(chunk)
                raise_store_failure(chunk)
                errors += chunk.failures.values()
                for name, value in (chunk.samples[0] or {}).items() if not chunk.failures else ():
                    is_encoded |= isinstance(read.get(name), Encoded) or isinstance(value, (Image, Pictures))
                    fields.setdefault(name, []).append(_seen(read.get(name), value))
    if not fields and not errors:
        raise SourceError(f"the {num} samples that were looked at hold no field: name the place that has the data")
    if not fields:
        raise SourceError(f"none of the {len(errors)} samples that were tried can be read: {errors[0]}")
    return SeenSamples(fields, is_encoded, num, num_tokens)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """`decode` is tried on everything, and would say where it decodes nothing. The check of the pipeline repeats all others."""
    logger = logging.getLogger("loaderkit")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


_KINDS: dict[type, str] = {Pictures: "pictures", str: "text"}


def _seen(read: Any, value: Any) -> Seen:
    if isinstance(read, Encoded) and read.extension in VIDEO_EXTENSIONS | AUDIO_EXTENSIONS:
        return Seen("video" if read.extension in VIDEO_EXTENSIONS else "audio")
    if isinstance(value, Image):
        return Seen("mask" if value.mask else "picture")
    if type(value) in _KINDS:
        return Seen(_KINDS[type(value)])
    if (found := shape_and_dtype(value)) is not None:
        return Seen("array" if found[0] else "number", *found)
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    return Seen("chat" if is_chat else "other")
