"""Turns a DataLoader into a pipeline: its data set, transforms, order and batches.

DataLoader ──dataset──> source, stages     ──sampler, batch_size, drop_last──> order, batch
    └── what has no counterpart: `Unported`, and then there is no pipeline at all
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from loaderkit.pipeline.config.builder import Pipeline
from loaderkit.profile.port.datasets import PortedSource, by_reference, port_dataset
from loaderkit.profile.port.parts import Unported
from loaderkit.profile.port.recognise import CannotPort, class_of, describe, name_of_function, where
from loaderkit.profile.port.transforms import Ported, port_transforms

_COLLATE = "torch.utils.data._utils.collate.default_collate"
_SAMPLERS = (
    "torch.utils.data.sampler",
    "torch.utils.data.distributed",
    "torchdata.stateful_dataloader.sampler",
)


@dataclass(frozen=True)
class PortedPipeline:
    """The result of porting a DataLoader. `pipeline` is the mapping of a pipeline's YAML, or None if something has no
    counterpart."""

    pipeline: dict[str, Any] | None
    source: PortedSource | None = None
    images: Ported | None = None
    unported: tuple[Unported, ...] = ()
    notes: tuple[str, ...] = ()
    dataset: Any = None  # the script's
    collate: Callable[[list[Any]], Any] | None = None

    @property
    def runs_own_code(self) -> bool:
        """True if the pipeline keeps a data set whose code may run for one item at a time."""
        dataset = None if self.source is None else self.source.dataset
        return dataset is not None and type(dataset) is not torch.utils.data.TensorDataset

    def here(self) -> Pipeline:
        """The pipeline as it runs in this process, with the script's data set where the file names that."""
        assert self.pipeline is not None
        assert self.source is not None
        if self.source.dataset is None:
            return Pipeline(self.pipeline)
        source = {name: value for name, value in self.pipeline["source"].items() if name != "args"}
        return Pipeline({**self.pipeline, "source": {**source, "object": self.source.dataset}})


@dataclass
class _Failures:
    """What cannot be ported, all of it: a reader is to see everything at once."""

    found: list[Unported] = field(default_factory=list)

    @contextmanager
    def noted(self, part: str, subject: Any) -> Iterator[None]:
        """Note the errors raised for `part` of `subject`."""
        try:
            yield
        except ExceptionGroup as group:
            for error in group.exceptions:
                self._note(part, error, subject)
        except Exception as error:
            self._note(part, error, subject)

    def _note(self, part: str, error: Exception, subject: Any) -> None:
        why = f"its attributes are not those that loaderkit knows ({type(error).__name__}: {error})"
        if isinstance(error, CannotPort):
            why, subject = str(error), error.subject
        self.found.append(Unported(part=part, what=describe(subject), where=where(subject), why=why))


def port_loader(loader: Any, name: str) -> PortedPipeline:
    """The pipeline that gives the same samples as a DataLoader. Its attributes are read, and its data set's; nothing else."""
    failures, notes = _Failures(), []
    source: PortedSource | None = None
    images: Ported | None = None
    order: dict[str, Any] = {}
    with failures.noted("data set", loader.dataset):
        source = port_dataset(loader.dataset)
    if source is not None and source.has_pictures:
        with failures.noted("transform", source.transform):
            images, source = _pictures(source, loader.dataset)
    if loader.batch_sampler is not None:
        with failures.noted("collate_fn", loader.collate_fn):
            _check_collate(loader)
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        with failures.noted("sampler", loader.sampler):
            _check_batches(loader)
            order, noted = _order(loader.sampler)
            notes += noted
    if failures.found or source is None:
        return PortedPipeline(None, unported=tuple(failures.found))
    if loader.worker_init_fn is not None:
        notes.append(f"worker_init_fn ({describe(loader.worker_init_fn)}) is not called")
    notes = [*source.notes, *notes]
    batch = {"size": loader.batch_size, **({"drop_last": True} if loader.drop_last else {})}
    pipeline = {
        "name": name,
        "source": dict(source.source),
        "order": order,
        "stages": ["read", *_stages(images), {"batch": batch}, *_behind(images)],
    }
    # The script's own object may go as early as ever, and another one be made for the next epoch.
    dataset = loader.dataset if source.dataset is loader.dataset else copy.copy(loader.dataset)
    return PortedPipeline(pipeline, source, images, (), tuple(notes), dataset, loader.collate_fn)


def _pictures(source: PortedSource, dataset: Any) -> tuple[Ported | None, PortedSource]:
    """The stages of the pictures of a source; if a transform has none, the data set by its name, if a module holds it. Raises
    ExceptionGroup of CannotPort."""
    try:
        return port_transforms(source.transform), source
    except ExceptionGroup as group:
        names = ", ".join(describe(error.subject) for error in group.exceptions if isinstance(error, CannotPort))
        try:
            return None, by_reference(dataset, f"{names} has no counterpart")
        except CannotPort:
            raise group from None


def _check_collate(loader: Any) -> None:
    if name_of_function(loader.collate_fn) != _COLLATE:
        raise CannotPort(
            loader.collate_fn,
            "what it makes of samples cannot be seen: as a function of the batch's fields it can be a `call` behind `batch`",
        )


def _check_batches(loader: Any) -> None:
    if loader.batch_size is None or _sampler_name(loader.batch_sampler) != "BatchSampler":
        subject = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        raise CannotPort(
            subject, "batches are of `batch: {size}` samples each, one behind the other in the order of samples"
        )


def _order(sampler: Any) -> tuple[dict[str, Any], list[str]]:
    kind = _sampler_name(sampler)
    if kind == "SequentialSampler":
        return {"shuffle": "none"}, []
    if kind == "RandomSampler":
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise CannotPort(
                sampler, "`order` has each sample once an epoch: not with replacement, nor another number of them"
            )
        generator = sampler.generator
        seed = 0 if generator is None else generator.initial_seed() % 2**63
        return {"shuffle": "global", "seed": seed}, ["shuffled as well, in an order of its own"]
    if kind in ("DistributedSampler", "StatefulDistributedSampler"):
        order = {"shuffle": "global", "seed": sampler.seed} if sampler.shuffle else {"shuffle": "none"}
        return order, ["each rank has its share by RANK and WORLD_SIZE, without a DistributedSampler"]
    raise CannotPort(sampler, "`order` is global, block or none: which samples it takes, and how often, cannot be seen")


def _sampler_name(sampler: Any) -> str:
    """Of torch's own samplers, and of torchdata's, which take their places."""
    module, _, name = class_of(sampler).rpartition(".")
    return name if module in _SAMPLERS else ""


def _stages(images: Ported | None) -> list[Any]:
    if images is None:
        return []
    return [{"decode": {"exif_orientation": True}} if images.upright else "decode", *images.stages]


def _behind(images: Ported | None) -> list[Mapping[str, Any]]:
    normalize = None if images is None else images.normalize
    return [] if normalize is None else [{"normalize": normalize}]
