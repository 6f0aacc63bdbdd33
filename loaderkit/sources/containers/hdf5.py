"""HDF5 files, read by h5py through ranges of a connector. h5py lets one thread of a process read at a time; what is packed by
gzip is unpacked by all of them (hdf5_chunks.py).

Only what lies in the file itself is read: links to other files, external storage, virtual data sets and filters that HDF5 would
load a plugin for are refused before anything of them is opened.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError, MissingExtraError
from loaderkit.sources.containers.formats import USUAL, ContainerArgs, ContainerFormat, HDF5Args, StoredArray
from loaderkit.sources.containers.hdf5_chunks import FILTERS, PackedChunks
from loaderkit.sources.containers.source import kind_of
from loaderkit.sources.listing import list_matching
from loaderkit.sources.patterns import Patterns, is_hidden

_PAGE_BYTES, _NUM_PAGES = 256 << 10, 16
_NUM_THREADS = 8
_MOST_LINKS = 16

_OTHER_FORMATS = {  # by how a file begins
    b"MATLAB 5.0": "a MATLAB file of a version before 7.3, which is no HDF5: write it by save(..., '-v7.3')",
    b"\x0e\x03\x13\x01": "an HDF4 file: h4toh5 makes HDF5 of it",
    b"CDF": "a classic NetCDF file, which is no HDF5: nccopy -k nc4 makes it one",
}


class RangedFile(io.RawIOBase):
    """An object of a connector as a file: small reads, of HDF5's tables, by pages that are held; large ones as they are."""

    def __init__(self, connector: Connector, info: ObjectInfo) -> None:
        self._connector, self._info, self._offset = connector, info, 0
        self._pages: OrderedDict[int, bytearray] = OrderedDict()
        self.failure = threading.local()  # what a read raised, of which HDF5 tells nothing

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._info.size}[whence]
        return self._offset

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        memory = memoryview(buffer).cast("B")
        num = max(0, min(len(memory), self._info.size - self._offset))
        try:
            if num >= _PAGE_BYTES:
                self._connector.read_into(self._info.key, self._offset, memory[:num], etag=self._info.etag)
            else:
                self._copy(memory[:num])
        except Exception as error:
            self.failure.error = error
            raise
        self._offset += num
        return num

    def _copy(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            number, inside = divmod(self._offset + done, _PAGE_BYTES)
            part = memoryview(self._page(number))[inside : inside + len(memory) - done]
            memory[done : done + len(part)] = part
            done += len(part)

    def _page(self, number: int) -> bytearray:
        page = self._pages.pop(number, None)
        if page is None:
            start = number * _PAGE_BYTES
            page = bytearray(min(_PAGE_BYTES, self._info.size - start))
            self._connector.read_into(self._info.key, start, memoryview(page), etag=self._info.etag)
        self._pages[number] = page
        while len(self._pages) > _NUM_PAGES:
            self._pages.popitem(last=False)
        return page


class _Dataset:
    """A data set whose failed reads raise what the connector raised, and whose chunks unpack within a bound."""

    def __init__(self, h5py: Any, data: Any, file: RangedFile) -> None:
        self._data, self._file = data, file
        self._packed = PackedChunks(h5py, data) if data.id.get_create_plist().get_nfilters() else None
        self.shape: tuple[int, ...] = data.shape
        self.dtype, self.chunks = data.dtype, data.chunks

    def __getitem__(self, selection: Any) -> Any:
        self._file.failure.error = None
        try:
            if self._packed is not None and self._packed.is_ours:
                return self._packed.read(selection)
            if self._packed is not None:
                self._packed.check(selection)
            return self._data[selection]
        except Exception as error:
            raise self._file.failure.error or error from None


def _find(connector: Connector, args: ContainerArgs) -> list[ObjectInfo]:
    assert isinstance(args, HDF5Args)
    if args.is_one:
        return [connector.stat(args.key)]
    if args.include is not None:
        return list_matching(connector, Patterns(args.include), args.url, _NUM_THREADS)
    return [info for info in connector.list("") if info.key.lower().endswith(USUAL) and not is_hidden(info.key)]


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(f"HDF5 needs h5py ({error}): pip install 'loaderkit[volumes]'") from error
    return h5py


def _open(connector: Connector, info: ObjectInfo, paths: Mapping[str, str]) -> Mapping[str, StoredArray]:
    h5py, ranged = _h5py(), RangedFile(connector, info)
    with _errors_of(ranged):
        file = h5py.File(ranged, "r")
        return {field: _Dataset(h5py, _data_set(h5py, file, path), ranged) for field, path in paths.items()}


def shapes_of(connector: Connector, info: ObjectInfo) -> dict[str, tuple[int, ...]]:
    """The shapes of all data sets of a file, by path; links are not followed. Raises as opening does."""
    h5py, ranged = _h5py(), RangedFile(connector, info)
    shapes: dict[str, tuple[int, ...]] = {}

    def note(path: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None and item.dtype.kind in "biufc":
            shapes[path] = item.shape

    with _errors_of(ranged), h5py.File(ranged, "r") as file:
        file.visititems(note)
    return shapes


@contextmanager
def _errors_of(ranged: RangedFile) -> Iterator[None]:
    """What the connector raised while HDF5 read, or what is known of a file that is none."""
    try:
        yield
    except FormatError:
        raise
    except Exception as error:
        failed = getattr(ranged.failure, "error", None)
        if failed is None and (other := _other_format(ranged)):
            raise FormatError(other) from error
        raise failed or error from None


def _other_format(file: RangedFile) -> str:
    """What to do with a file in a format that has the same extension; "" for any other."""
    file.seek(0)
    begin = file.read(16)
    return next((remedy for known, remedy in _OTHER_FORMATS.items() if begin.startswith(known)), "")


def _data_set(h5py: Any, file: Any, path: str) -> Any:
    """The data set at a path, found link by link, as opening one would follow links out of the file."""
    parts, group, links = path.split("/"), file, 0
    while parts:
        name = parts.pop(0)
        if not isinstance(group, h5py.Group):
            raise FormatError(f"it has no data set {path!r}: what comes before {name!r} is no group")
        link = group.get(name, getlink=True)
        if link is None:
            raise FormatError(
                f"it has no {name!r} of the path {path!r}, only {', '.join(sorted(group)[:20]) or 'nothing'}"
            )
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > _MOST_LINKS:
                raise FormatError(f"its path {path!r} follows more than {_MOST_LINKS} links")
            group = file if link.path.startswith("/") else group
            parts = [part for part in link.path.split("/") if part not in ("", ".")] + parts
            continue
        if not isinstance(link, h5py.HardLink):
            raise FormatError(f"its {name!r} of the path {path!r} is a link to another file, which is not followed")
        group = group[name]
    if not isinstance(group, h5py.Dataset):
        raise FormatError(f"its {path!r} is a group, no data set; it has {', '.join(sorted(group)[:20]) or 'nothing'}")
    if group.shape is None:
        raise FormatError(f"its data set {path!r} is empty: it has no values")
    if group.is_virtual or group.external:
        raise FormatError(
            f"the values of its data set {path!r} lie in other files, which are not read: copy them into it"
        )
    described = group.id.get_create_plist()
    for number in range(described.get_nfilters()):
        code, _, _, name = described.get_filter(number)
        if code not in FILTERS:
            raise FormatError(
                f"its data set {path!r} is packed by the filter {code} ({name.decode(errors='replace')}), for which HDF5 "
                "would load a plugin, and none is loaded: repack it with gzip or lzf (h5repack)"
            )
    return group


HDF5 = kind_of(HDF5Args, ContainerFormat("HDF5", "HDF5 file (.h5, .hdf5, .hdf, .mat)", _find, _open))
