"""Turns data sets into a `source`: those of known classes, and any other that a module holds.

Each kind is recognised by the class whose `__getitem__` runs, so that a subclass with one of its own is another kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loaderkit.profile.port.recognise import (
    CannotPort,
    class_of,
    folder_of_module,
    name_in_script,
    name_of_function,
    reference_to,
)

_LOADERS = ("torchvision.datasets.folder.default_loader", "torchvision.datasets.folder.pil_loader")
_MOST_NAMED = 50_000  # files of a subset that a pipeline may name one by one
_MOST_BYTES = 4 * 2**30  # of tensors that are written to a file
_SIGNS = "*?[{"


@dataclass(frozen=True)
class PortedSource:
    """A data set as `source`. `fields`: names for the items of a tuple; None means keys or numbers, as the items
    themselves have."""

    source: Mapping[str, Any]
    fields: tuple[str, ...] | None = None
    index_of: Callable[[str], int] = int  # of a sample's key: its number in the script's data set
    transform: Any = None  # of the pictures
    has_pictures: bool = False
    dataset: Any = (
        None  # to run in its place in this process, where `source` names it or a file that is yet to be written
    )
    tensors: tuple[torch.Tensor, ...] = ()  # to be written to that file
    samples: Sequence[tuple[str, int]] = ()  # of files: paths relative to `url` and classes, in order
    notes: tuple[str, ...] = ()


def port_dataset(dataset: Any) -> PortedSource:
    """The source that has the samples of a data set. Raises CannotPort."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise CannotPort(
            dataset, "an IterableDataset splits its samples by workers itself, and its code cannot be seen"
        )
    kinds: dict[str, Callable[[Any], PortedSource]] = {
        "torchvision.datasets.folder.DatasetFolder": _folder,
        "torch.utils.data.dataset.TensorDataset": _tensor_dataset,
        "datasets.arrow_dataset.Dataset": _hugging_face,
        "torch.utils.data.dataset.Subset": _subset,
    }
    make = kinds.get(_origin(dataset, "__getitem__"))
    if make is None or _origin(dataset, "__getitems__") not in (*kinds, ""):
        return by_reference(dataset, "loaderkit cannot see what its __getitem__ does")
    return make(dataset)


def _origin(value: Any, method: str) -> str:
    """The class of which an object has a method."""
    owner = next((base for base in type(value).__mro__ if method in vars(base)), None)
    return "" if owner is None else f"{owner.__module__}.{owner.__qualname__}"


def by_reference(dataset: Any, why: str) -> PortedSource:
    """A data set by the name that a module has for it. Raises CannotPort, which says `why` nothing better was found."""
    reference = reference_to(dataset)
    if reference is None:
        name = name_in_script(dataset)
        of_script = "" if name is None else f" (to import the script, for its {name!r}, would run the training)"
        raise CannotPort(
            dataset,
            f"{why}, and no module holds it as an attribute{of_script}: make it at the top level of a module of its own, as in "
            "data.py, and import it from there",
        )
    folder, place = folder_of_module(reference), reference.partition(":")[0]
    notes = [f"{class_of(dataset)}: {why}, so its own code runs"]
    notes += [f"run it where {place} can be imported: in {folder}, or with that in PYTHONPATH"] if folder else []
    return PortedSource({"kind": "dataset", "object": reference}, dataset=dataset, notes=tuple(notes))


# ------------------------------------------------------------------------------------------------- torchvision's folders


def _folder(dataset: Any) -> PortedSource:
    loader = name_of_function(dataset.loader)
    if loader not in _LOADERS:
        raise CannotPort(dataset.loader, "pictures are read by it, and not by torchvision's default_loader")
    if dataset.target_transform is not None:
        raise CannotPort(
            dataset.target_transform, "what target_transform does to labels cannot be seen: do it in the loop"
        )
    root = os.fspath(dataset.root)
    prefix = os.path.join(root, "")
    if not all(path.startswith(prefix) for path, _ in dataset.samples):
        raise CannotPort(dataset, f"not all of its files lie in {root}")
    keys = [(path[len(prefix) :], number) for path, number in dataset.samples]
    extensions = sorted({key.rpartition(".")[2] for key, _ in keys})
    source = {
        "kind": "files",
        "url": os.path.abspath(root),
        "include": [f"**/*.{extension}" for extension in extensions],
        "label": "top",
        **_classes(dataset, {key.partition("/")[0] for key, _ in keys}),
    }
    return PortedSource(source, ("image", "label"), transform=dataset.transform, has_pictures=True, **_samples(keys))


def _samples(keys: Sequence[tuple[str, int]]) -> dict[str, Any]:
    return {"samples": keys, "index_of": {key: number for number, (key, _) in enumerate(keys)}.__getitem__}


def _classes(dataset: Any, used: set[str]) -> dict[str, Any]:
    """`classes`, unless it is what loaderkit makes of the folders by itself."""
    numbers: dict[str, int] = dict(dataset.class_to_idx)
    if numbers == {name: number for number, name in enumerate(sorted(used))}:
        return {}
    return {"classes": numbers}


# ------------------------------------------------------------------------------------------------------------- others


def _tensor_dataset(dataset: Any) -> PortedSource:
    return _of_tensors(dataset, dataset.tensors)


def _of_tensors(dataset: Any, tensors: Sequence[torch.Tensor]) -> PortedSource:
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise CannotPort(dataset, "its tensors are on a GPU: they need no loading")
    if sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
        return by_reference(dataset, "its tensors are in memory, and too large to write beside the pipeline")
    kept = tuple(tensor.detach().contiguous() for tensor in tensors)
    return PortedSource(
        {"kind": "dataset", "object": "loaderkit.integrations.saved:tensors", "args": {"file": ""}},
        dataset=torch.utils.data.TensorDataset(*kept),
        tensors=kept,
        notes=("its tensors are in the script's memory alone: they are in a file beside the pipeline",),
    )


def _hugging_face(dataset: Any) -> PortedSource:
    files = [file["filename"] for file in dataset.cache_files]
    given = dataset.format
    why = None
    if dataset._indices is not None:
        why = "it is a selection of rows (filter, shuffle, select, train_test_split): save it by save_to_disk and load that"
    elif not files:
        why = "it is in memory alone: save it by save_to_disk and load that"
    elif given["type"] not in (None, "torch", "numpy") or given["format_kwargs"] or given["output_all_columns"]:
        why = f"its rows pass through code that cannot be seen (format {given['type']}, or arguments of it)"
    if why is not None:
        return by_reference(dataset, why)
    is_whole = given["columns"] == dataset.column_names
    arguments = {
        "files": [os.path.abspath(file) for file in files],
        **({} if given["type"] is None else {"format": given["type"]}),
        **({} if is_whole else {"columns": given["columns"]}),
    }
    source = {"kind": "dataset", "object": "loaderkit.integrations.saved:arrow_files", "args": arguments}
    return PortedSource(source)


def _subset(subset: Any) -> PortedSource:
    """The samples of `indices`, as random_split gives them."""
    indices = [*map(int, subset.indices)]
    inner = port_dataset(subset.dataset)
    if len({*indices}) < len(indices):
        raise CannotPort(subset, "some of its samples are there several times")
    if inner.tensors:
        return _of_tensors(subset, [tensor[indices] for tensor in inner.tensors])
    if inner.samples:
        return _some_files(subset, inner, indices)
    if indices == [*range(len(indices))]:
        return replace(inner, source={**inner.source, "limit": len(indices)})
    raise CannotPort(
        subset, "`source` has the first samples, or all, not a selection: save the selection as a data set of its own"
    )


def _some_files(subset: Any, inner: PortedSource, indices: Sequence[int]) -> PortedSource:
    """Its files, one by one."""
    keys = [inner.samples[index] for index in indices]
    if len(keys) > _MOST_NAMED or any(sign in key for key, _ in keys for sign in _SIGNS):
        raise CannotPort(
            subset,
            f"its {len(keys)} files would be named one by one: move them to a folder of their own (or link them)",
        )
    classes = {key.partition("/")[0]: number for key, number in inner.samples}
    source = {**inner.source, "include": sorted(key for key, _ in keys), "classes": classes}
    return replace(inner, source=source, **_samples(keys))
