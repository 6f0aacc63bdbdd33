"""Mosaic streaming: MDS shards holding the JPEGs' bytes, read where they lie; DataLoader with 2 workers, 4 batches each.

Importing `streaming` imports its ready-made torchvision data sets, which are not used here, and torchvision has no build for
this torch on the CPU alone: two empty names stand in for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers.tokenization_utils_base  # noqa: F401 - it must look for torchvision before there is a stand-in
from torch.utils.data import DataLoader

from profiles.peers.contestants import pixels
from profiles.peers.places import Places, labelled


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules.setdefault(name, module)


_stand_in("torchvision")
_stand_in("torchvision.datasets", VisionDataset=object)
_stand_in("torchvision.transforms")
_stand_in("torchvision.transforms.functional", to_tensor=None)

from streaming import MDSWriter, Stream, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

PACKAGE = "mosaicml-streaming"


class _Photographs(StreamingDataset):  # type: ignore[misc]
    """Samples are {"image": bytes, "label": int}."""

    def __init__(self, folder: Path, decoder: str | None) -> None:
        """`decoder`: None for the bytes as they are."""
        # Repeated, so that an epoch is long.
        super().__init__(streams=[Stream(local=str(folder), repeat=100)], shuffle=True, batch_size=64)
        self._augment = None if decoder is None else pixels.AUGMENTS[decoder]

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return sample["image"] if self._augment is None else (self._augment(sample["image"]), sample["label"])


def _files(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    """Setting `decoder`."""
    clean_stale_shared_memory()
    dataset = _Photographs(places.mosaic, settings.get("decoder", "simplejpeg"))
    return DataLoader(dataset, batch_size=64, num_workers=2, prefetch_factor=4, persistent_workers=True, drop_last=True)


def _raw(places: Places, settings: dict[str, Any]) -> Iterable[Any]:
    clean_stale_shared_memory()
    dataset = _Photographs(places.mosaic, None)
    return DataLoader(dataset, 64, num_workers=2, prefetch_factor=4, persistent_workers=True, collate_fn=_in_a_tuple)


def _in_a_tuple(samples: list[bytes]) -> tuple[list[bytes]]:
    return (samples,)


def make(places: Places, target: Path) -> None:
    """Write the photos as shards of 8 MB."""
    with MDSWriter(out=str(target), columns={"image": "bytes", "label": "int"}, size_limit=8 << 20) as writer:
        for path, label in labelled(places.photos):
            writer.write({"image": path.read_bytes(), "label": label})


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    **dict.fromkeys(("files", "mds"), _files),
    "raw-mds": _raw,
}
