"""What a format of containers gives: its arguments, which keys are stores, and their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field, field_validator

from loaderkit._internal.config.settings import ByteSize
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.config import StoreArgs
from loaderkit.sources.fields import Include

USUAL = (".h5", ".hdf5", ".hdf", ".mat")


class StoredArray(Protocol):
    """What arrays of h5py and of zarr have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def chunks(self) -> Sequence[int] | None: ...

    def __getitem__(self, selection: Any) -> Any: ...


class ContainerFormat(NamedTuple):
    """A format of containers: `find(connector, args)` gives its stores, `open(connector, store, paths)` the arrays at these
    paths of one, field by field; it raises FormatError, MissingExtraError and what the connector raises."""

    name: str
    noun: str
    find: Callable[[Connector, ContainerArgs], list[ObjectInfo]]
    open: Callable[[Connector, ObjectInfo, Mapping[str, str]], Mapping[str, StoredArray]]


class ContainerArgs(StoreArgs):
    """Named arrays in files or stores."""

    _root_may_be_array: ClassVar[bool] = False

    url: Annotated[str, Field(min_length=1, description="the file or store; or a folder, of which all below are read")]
    samples: Literal["rows", "whole"] = Field(
        description="rows: each index of the arrays' first dimension is a sample; whole: each file or store is one"
    )
    fields: Mapping[str, str] = Field(
        min_length=1, description="field -> path of its array, as in {image: images, label: meta/labels}"
    )

    @field_validator("fields")
    @classmethod
    def _names_are_free(cls, fields: Mapping[str, str]) -> Mapping[str, str]:
        for name, path in fields.items():
            if name.startswith("__") or not (path.strip("/") or cls._root_may_be_array) or ".." in path.split("/"):
                raise ValueError(f"field -> path of an array, not {name!r}: {path!r}; names do not begin with __")
        return {name: path.strip("/") for name, path in fields.items()}

    memory: ByteSize = Field(
        2**30,
        description="of rows: how much of chunks that several rows share is held unpacked in one process, so that they are "
        "unpacked once",
    )

    @property
    def is_one(self) -> bool:
        """True if `url` names a file or store by its extension, and no folder of them."""
        raise NotImplementedError

    @property
    def root(self) -> str:
        """The connector's root: the folder, or that of the one file or store."""
        url = self.url.rstrip("/")
        return (url[: url.rfind("/") + 1] or ".") if self.is_one else self.url

    @property
    def key(self) -> str:
        """The key of the one file or store below `root`."""
        return self.url.rstrip("/").rpartition("/")[2]


class HDF5Args(ContainerArgs):
    """Data sets in HDF5 files (.h5, .hdf5, .hdf, and .mat of MATLAB 7.3). h5py reads one at a time in a process, whatever the
    threads.

    Nothing but the file itself is read, and no plugin is loaded: links to other files, external storage, virtual data sets and
    filters other than gzip, lzf, szip, shuffle, fletcher32, n-bit and scale-offset are errors. Needs `loaderkit[volumes]`.
    """

    kind: Literal["hdf5"] = "hdf5"
    include: Include | None = Field(
        None,
        description="which files of a folder, relative to url: globs with **, and braces; default: all that end in .h5, "
        ".hdf5, .hdf or .mat",
    )

    @property
    def is_one(self) -> bool:
        """True if `url` ends with the extension of a file."""
        return self.url.lower().endswith((*USUAL, ".he5", ".nc"))


class ZarrArgs(ContainerArgs):
    """Arrays in Zarr stores, of version 3 or 2. A chunk that is not there holds the fill value.

    A store that is one array, as `zarr.save_array` writes it, has the path "/". Numbers only, and packings of bytes (blosc,
    zstd, gzip, lz4, shards and the like); objects and pickles are errors. Of a folder that does not hold the arrays itself all
    objects are listed to find the stores. Needs `loaderkit[volumes]`.
    """

    _root_may_be_array = True

    kind: Literal["zarr"] = "zarr"

    @property
    def is_one(self) -> bool:
        """True if `url` ends with `.zarr`."""
        return self.url.rstrip("/").lower().endswith(".zarr")
