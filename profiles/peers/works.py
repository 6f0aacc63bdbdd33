"""Which works there are, and who takes part in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from profiles.peers.environments import OWN


@dataclass(frozen=True)
class Contestant:
    """One way to do a work. `against`: loaderkit's contestant whose speed is divided by this one's; default: the first.
    `tree`: another checkout of loaderkit, whose package and worker are run; its C modules have been built in place."""

    name: str
    environment: str
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    look: str | None = None  # None: the work's
    optional: bool = False  # takes part only if named
    tree: str | None = None


@dataclass(frozen=True)
class Work:
    """`mode`: stream (batches without end), first (building up to the first batch), first-epoch, busy or memory.

    `skip`: batches that pass before the clock runs, since they were read ahead; `warm`: samples that pass before the first
    round; `least`: batches a turn has at the least, several times as many as are made at once, since those come in a burst.
    """

    name: str
    title: str
    look: str
    parts: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    mode: str = "stream"
    unit: str = "samples/s"
    skip: int = 8
    warm: int = 1500
    least: int = 16


def _own(name: str, against: str | None = None, optional: bool = False, **settings: Any) -> Contestant:
    return Contestant(
        name, OWN, "ours", {key.replace("__", "."): value for key, value in settings.items()}, against, None, optional
    )


def _peer(name: str, environment: str, module: str, against: str | None = None, **settings: Any) -> Contestant:
    return Contestant(name, environment, module, settings, against)


def _limit(name: str, limit: str, look: str | None = "nothing") -> Contestant:
    return Contestant(name, OWN, "limits", {"limit": limit}, None, look)


_LOADERKIT = _own("loaderkit")
_PROCESS = _own("loaderkit-process", prefetch__executor="process")
_PILLOW = _peer("dataloader-pillow", "torch", "dataloader", decoder="pillow")
_DALI = _peer("dali", "dali", "dali")

_FILES = (
    _LOADERKIT,
    _PROCESS,
    _PILLOW,
    _peer("dataloader-simplejpeg", "torch", "dataloader", decoder="simplejpeg"),
    _peer("torchdata-threads", "torch", "nodes", method="thread"),
    _peer("torchdata-processes", "torch", "nodes", method="process"),
    _peer("spdl", "spdl", "spdl", decoder="spdl"),
    _peer("spdl-simplejpeg", "spdl", "spdl", decoder="simplejpeg"),
    _peer("grain-threads", "grain", "grain", workers="threads"),
    _peer("grain-processes", "grain", "grain", workers="processes"),
    _DALI,
    _peer("dali-no-antialias", "dali", "dali", way="no-antialias"),
    _peer("dali-fused", "dali", "dali", way="fused"),
    _peer("litdata", "litdata", "litdata"),
    _peer("mosaic", "mosaic", "mosaic"),
    _peer("tensorflow", "tensorflow", "tfdata"),
    _peer("tensorflow-fused", "tensorflow", "tfdata", fused=True),
    _limit("limit-pure-decode", "decode"),
    _limit("limit-bare-pool", "pool", None),
)

_NO_ANTIALIAS = (
    _LOADERKIT,
    _peer("dali-no-antialias", "dali", "dali", way="no-antialias"),
    _peer("tensorflow", "tensorflow", "tfdata"),
    _peer("tensorflow-fused", "tensorflow", "tfdata", fused=True),
)

_TAR = (
    _LOADERKIT,
    _own("loaderkit-files", source="files"),
    _peer("webdataset-pillow", "torch", "wds", decoder="pillow"),
    _peer("webdataset-simplejpeg", "torch", "wds", decoder="simplejpeg"),
    _DALI,
    _peer("dali-fused", "dali", "dali", way="fused"),
)

_MDS = (
    _LOADERKIT,
    _peer("mosaic-pillow", "mosaic", "mosaic", decoder="pillow"),
    _peer("mosaic", "mosaic", "mosaic"),
)

_RAW = (
    _own("loaderkit", order__shuffle="none"),
    _own("loaderkit-global", order__shuffle="global"),
    _own("loaderkit-inline", order__shuffle="none", prefetch__executor="inline"),
    _peer("webdataset", "torch", "wds"),
    _peer("webdataset-shuffle", "torch", "wds", "loaderkit-global", shuffle=True),
    _peer("webdataset-in-process", "torch", "wds", "loaderkit-inline", num_workers=0),
)

_ITEMS = (
    _LOADERKIT,
    _own("loaderkit-inline", prefetch__executor="inline"),
    _peer("dataloader", "torch", "dataloader"),
    _peer("dataloader-in-process", "torch", "dataloader", "loaderkit-inline", num_workers=0),
    _peer("torchdata-threads", "torch", "nodes", method="thread"),
    _peer("torchdata-processes", "torch", "nodes", method="process"),
    _peer("torchdata-by-item", "torch", "nodes", task="item"),
    _peer("spdl", "spdl", "spdl"),
    _peer("spdl-by-item", "spdl", "spdl", task="item"),
    _peer("grain-threads", "grain", "grain", workers="threads"),
    _peer("grain-processes", "grain", "grain", workers="processes"),
)

_ARRAYS = (_LOADERKIT, _peer("dataloader", "torch", "dataloader"), _limit("limit-preadv", "preadv"))

_LARGE_PHOTOS = (
    _LOADERKIT,
    _own("loaderkit-scaled", scaled=True),
    _PILLOW,
    _peer("dataloader-pillow-draft", "torch", "dataloader", "loaderkit-scaled", draft=True),
    _peer("dali", "dali", "dali", "loaderkit-scaled"),
)

_STEPS = (_LOADERKIT, _PROCESS, _peer("dataloader-pillow", "torch", "dataloader"))

_ALL = (
    Work(
        "files", "JPEG files of 56 kB to 224, antialiased, float32", "pixels", ("photos", "litdata", "mosaic"), _FILES
    ),
    Work("files-no-antialias", "the same without antialiasing", "pixels", ("photos",), _NO_ANTIALIAS),
    Work("tar", "the same from tar shards", "pixels", ("photos", "shards"), _TAR),
    Work("mds", "the same from MDS shards", "pixels", ("photos", "mosaic"), _MDS),
    Work(
        "raw-mds",
        "bytes of photographs in MDS shards",
        "raw",
        ("photos", "mosaic"),
        (_LOADERKIT, _peer("mosaic", "mosaic", "mosaic")),
        skip=24,
    ),
    Work(
        "raw-tar",
        "bytes of small samples in tar shards",
        "raw",
        ("small-shards",),
        _RAW,
        skip=64,
        warm=20_000,
        least=64,
    ),
    Work("raw-tar-photos", "bytes of photographs in tar shards", "raw", ("photos", "shards"), _RAW, skip=24),
    Work(
        "raw-tar-first",
        "first epoch over small samples, index not there",
        "raw",
        ("small-shards",),
        _RAW,
        "first-epoch",
    ),
    Work(
        "raw-tar-photos-first",
        "first epoch over photographs, index not there",
        "raw",
        ("photos", "shards"),
        _RAW,
        "first-epoch",
    ),
    Work(
        "dataset",
        "a torch Dataset of one-element tensors, batch 64",
        "items",
        (),
        _ITEMS,
        skip=64,
        warm=20_000,
        least=64,
    ),
    Work(
        "dataset-records",
        "a torch Dataset of NumPy records of 16 bytes, batch 64",
        "records",
        ("records",),
        _ITEMS,
        skip=64,
        warm=20_000,
        least=64,
    ),
    Work(
        "records",
        "records of 16 bytes of one .npy, batch 64",
        "records",
        ("records",),
        _ITEMS,
        skip=64,
        warm=20_000,
        least=64,
    ),
    Work("large-npy", ".npy files of 150 MB, batch 2", "arrays", ("npy",), (*_ARRAYS, _DALI), warm=16),
    Work("large-npz", "stored .npz files of 150 MB, batch 2", "arrays", ("npz",), _ARRAYS, warm=16),
    Work(
        "tokens",
        "windows of 2,049 tokens of a file of 1 GB, batch 16",
        "tokens",
        ("tokens",),
        _ITEMS[:5],
        skip=32,
        warm=2000,
    ),
    Work(
        "photo-resize", "JPEGs of 12 megapixels to 224", "pixels", ("large-photos",), _LARGE_PHOTOS, warm=96, least=16
    ),
    Work(
        "photo-crop",
        "JPEGs of 12 megapixels, random crop to 224",
        "pixels",
        ("large-photos",),
        _LARGE_PHOTOS,
        warm=96,
        least=16,
    ),
    Work(
        "first-batch",
        "from building to the first batch of `files`",
        "pixels",
        ("photos",),
        (*_STEPS, _limit("limit-import-torch", "import")),
        "first",
        "s",
    ),
    Work("busy-step", "`files` under steps of 10 ms of plain Python", "pixels", ("photos",), _STEPS, "busy", "steps/s"),
    Work("memory", "resident memory above `import torch`, on `files`", "pixels", ("photos",), _STEPS, "memory", "MiB"),
)

WORKS: dict[str, Work] = {work.name: work for work in _ALL}
