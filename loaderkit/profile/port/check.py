"""Compares a pipeline's samples with the samples of the script's data set, which confirms what was read from attributes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from loaderkit._internal.compare import differ
from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.experiments.interleave import ExperimentLoader
from loaderkit.profile.port.loader import PortedPipeline
from loaderkit.profile.port.parts import SampleCheck, Unported
from loaderkit.profile.port.recognise import describe, where

Build = Callable[..., AbstractContextManager[ExperimentLoader]]
"""`loaderkit.build`."""

_NUM_BATCHES, _NUM_SAMPLES = 2, 8
_MOST_S = 10.0
_LEVELS = 255
_ROUNDING = 0.01  # levels, of float32


class _DiffersError(Exception):
    """The samples are not the same; the message says of which, and how."""


def check_samples(ported: PortedPipeline, build: Build) -> tuple[PortedPipeline, SampleCheck | None]:
    """The same port with its `output` filled in, and the comparison's result. If samples differ, it has no pipeline,
    and the difference is in `unported`."""
    try:
        num_listed, notes = _check_listing(ported)
        ported = replace(ported, notes=(*ported.notes, *notes))
        return _check_batches(ported, build, num_listed)
    except (_DiffersError, LoaderkitError) as error:
        found = Unported(
            part="samples", what=describe(ported.dataset), where=where(ported.dataset), why=" ".join(str(error).split())
        )
        return replace(ported, pipeline=None, unported=(*ported.unported, found)), None


def _check_listing(ported: PortedPipeline) -> tuple[int, tuple[str, ...]]:
    """Compare all paths and classes of files, and note how their order differs. Raises _DiffersError, LoaderkitError."""
    assert ported.source is not None
    wanted = ported.source.samples
    if not wanted:
        return 0, ()
    plan = compile_pipeline(ported.here().config, rank=0, world_size=1)
    try:
        source = plan.source
        keys = source.keys(np.arange(len(source)))
        found = [(key, source.constants(index)["label"]) for index, key in enumerate(keys)]
    finally:
        plan.close()
    if found == [*wanted]:
        return len(wanted), ()
    if differing := {*wanted} ^ {*found}:
        raise _DiffersError(
            f"the data set has {len(wanted)} files, and loaderkit finds {len(found)}; for example {min(differing)[0]!r} is "
            "only in one of them, or of another class: hidden files and is_valid_file have no counterpart"
        )
    is_sequential = (ported.pipeline or {}).get("order") == {"shuffle": "none"}
    return len(wanted), ("in order of their paths, not folder by folder",) if is_sequential else ()


@dataclass
class _Comparison:
    """What was compared so far."""

    ported: PortedPipeline
    most_levels: float = 0.0
    is_random: bool = False

    def compare(self, wanted: Any, batch: Mapping[str, Any], again: Callable[[], Any]) -> None:
        """A batch of the script's, and one of the pipeline's. `again` makes the script's batch again."""
        for name, values in _named(wanted, self.ported).items():
            if name not in batch:
                raise _DiffersError(f"the script's batches have a field {name!r}, and loaderkit's {', '.join(batch)}")
            self._compare_field(name, values, batch[name], again)

    def _compare_field(self, name: str, wanted: Any, found: Any, again: Callable[[], Any]) -> None:
        if _shape_of(wanted) != _shape_of(found):
            raise _DiffersError(f"{name!r} is {_shape_of(wanted)} in the script's batches, and {_shape_of(found)} here")
        images = self.ported.images
        if images is not None and name == "image":
            self.is_random |= images.is_random
            if not images.is_random:
                self._compare_pixels(wanted, found, images.std, images.most_levels)
        elif differ(wanted, found):
            if not differ(wanted, _named(again(), self.ported)[name]):
                raise _DiffersError(f"{name!r} has other values")
            self.is_random = True

    def _compare_pixels(self, wanted: torch.Tensor, found: torch.Tensor, std: Sequence[float], most: int) -> None:
        differing = (wanted.to(torch.float64) - found.to(torch.float64)).abs()
        if wanted.dtype != torch.uint8:
            differing *= torch.tensor(std, dtype=torch.float64).reshape(-1, 1, 1) * _LEVELS
        levels = float(differing.max())
        if levels > most + _ROUNDING:
            raise _DiffersError(f"pixels differ by up to {levels:.1f} levels of 255, where {most} are to be expected")
        self.most_levels = max(self.most_levels, levels)


def _check_batches(ported: PortedPipeline, build: Build, num_listed: int) -> tuple[PortedPipeline, SampleCheck]:
    """Whole batches, as the script's collate_fn makes them of the same samples. Raises _DiffersError, LoaderkitError."""
    assert ported.pipeline is not None
    assert ported.source is not None
    assert ported.collate is not None
    overrides = {"stages.batch.size": _NUM_SAMPLES, "stages.batch.drop_last": False, "order.shuffle": "global"}
    pipeline = ported.here().output(None)
    comparison, num_samples, begin_s = _Comparison(ported), 0, time.perf_counter()
    with build(pipeline, overrides={**overrides, "prefetch.executor": "inline"}, rank=0, world_size=1) as loader:
        for number, batch in enumerate(loader, 1):
            indices = [ported.source.index_of(key) for key in batch["__key__"]]
            make = _Maker(ported, indices)
            wanted = make()
            if number == 1:
                ported = _with_output(ported, wanted)
            comparison.compare(wanted, batch, make)
            num_samples += len(indices)
            if number == _NUM_BATCHES or time.perf_counter() - begin_s > _MOST_S:
                break
    has_levels = ported.images is not None and not comparison.is_random
    return ported, SampleCheck(
        num_samples=num_samples,
        num_listed=num_listed,
        is_random=comparison.is_random,
        most_levels=comparison.most_levels if has_levels else None,
    )


@dataclass(frozen=True)
class _Maker:
    """Makes a batch of the script's samples, as its DataLoader does."""

    ported: PortedPipeline
    indices: Sequence[int]

    def __call__(self) -> Any:
        assert self.ported.collate is not None
        try:
            return self.ported.collate([self.ported.dataset[index] for index in self.indices])
        except Exception as error:
            raise _DiffersError(
                f"the script's own samples cannot be made here: {type(error).__name__}: {error}"
            ) from error


def _named(batch: Any, ported: PortedPipeline) -> Mapping[str, Any]:
    """The fields of a batch of the script's, by the names that they have here."""
    if isinstance(batch, Mapping):
        return batch
    items = batch if isinstance(batch, (tuple, list)) else [batch]
    names = (ported.source.fields if ported.source is not None else None) or map(str, range(len(items)))
    return dict(zip(names, items, strict=True))


def _with_output(ported: PortedPipeline, batch: Any) -> PortedPipeline:
    """With `output` of a tuple's fields where a batch of the script's is a tuple or list."""
    assert ported.pipeline is not None
    if isinstance(batch, Mapping):
        return ported
    if not isinstance(batch, (tuple, list)):
        return replace(
            ported, notes=(*ported.notes, "a batch is a dict, and what the script's batches are is its field '0'")
        )
    return replace(ported, pipeline={**ported.pipeline, "output": [*_named(batch, ported)]})


def _shape_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
