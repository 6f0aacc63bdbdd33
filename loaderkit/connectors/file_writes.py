"""Writing files: past the page cache where the file system allows it, under a temporary name until they are durable.

create ──> .<16 digits>.tmp, its blocks allocated ──> write: pwrite, O_DIRECT ──> commit: fdatasync, rename ──> sync: fsync
           └─> a full disk fails here                                                                          directories
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice

import numpy as np

from loaderkit._internal.system.interrupts import opened
from loaderkit._internal.temporary_files import create_temporary
from loaderkit.connectors.base import ObjectInfo, Writes, etag_of
from loaderkit.connectors.writing import Parts, WriteCounts, put_in_parts
from loaderkit.errors import ConnectorError, ObjectNotFoundError

Translate = Callable[[str, OSError | ValueError], ConnectorError]
PART_BYTES = 8 << 20
_ALIGNMENT = 4096  # of memory, place and length of a write past the page cache
TEMPORARY_NAME = re.compile(r"(?:\..+)?\.[0-9a-f]{16}\.tmp")
_MAX_NAME = 255  # bytes
# What file systems answer that cannot rename, such as buckets mounted by FUSE.
_NO_RENAME = {errno.ENOSYS, errno.EPERM, errno.ENOTSUP, errno.EINVAL}
_NO_OVERWRITE = {errno.EPERM, errno.EACCES, errno.EEXIST}
_NO_SYNC = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF}
_NO_PLACE = {errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class FileWrites(Writes):
    """The writing side of `FileConnector`. New directories are durable once something was created in them."""

    def __init__(self, root: str, path_of: Callable[[str], str], translate: Translate, counts: WriteCounts) -> None:
        """`path_of` gives the path of a key, or raises; `translate` turns an OSError about a key into the error to raise."""
        self._root = root
        self._path_of = path_of
        self._translate = translate
        self._counts = counts

    def part_bytes_of(self, size: int) -> int:
        """8 MiB."""
        return PART_BYTES

    def create(self, key: str, size: int) -> FileWriter:
        """Begin to write a file and its parent directories; its blocks are allocated now, so a full disk fails here."""
        path = self._path_of(key)
        parts = Parts(repr(path), size, PART_BYTES)
        translate = partial(self._translate, key)
        try:
            _check_name(path)
            _make_directories(os.path.dirname(path))
            return FileWriter(path, parts, key, translate, self._counts)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_PLACE:
                raise ConnectorError(f"{path!r} cannot be written: {_no_place(error)}") from error
            raise translate(error) from error

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Create or replace a small file, durably, with its parent directories."""
        info = put_in_parts(self, key, data)
        with self._counts.timed("syncing_s"):
            _sync_directory(os.path.dirname(self._path_of(key)))
        return info

    def delete(self, key: str) -> None:
        """Remove a file; a missing one is no error."""
        try:
            os.unlink(self._path_of(key))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise self._translate(key, error) from error

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """Rename a directory and make that durable; False on a file system that cannot."""
        old, new = self._directory(prefix), self._directory(new_prefix)
        if not os.path.isdir(old):
            raise ObjectNotFoundError(f"there is no directory {old!r}; was it moved or deleted?")
        try:
            _make_directories(os.path.dirname(new))
            with self._counts.timed("committing_s"):
                os.rename(old, new)
        except OSError as error:
            if error.errno in _NO_RENAME or error.errno == errno.EXDEV:  # the latter of overlayfs, for its lower layers
                return False
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise ConnectorError(f"{old!r} cannot be renamed to {new!r}: there are files in it already") from error
            raise self._translate(new_prefix, error) from error
        with self._counts.timed("syncing_s"):
            for directory in {os.path.dirname(old), os.path.dirname(new)}:
                _sync_directory(directory)
        return True

    def sync(self, prefix: str) -> None:
        """fsync the directory and all below it; one that is gone was deleted, so only the one above it."""
        path = self._directory(prefix)
        is_there = os.path.isdir(path)
        while not os.path.isdir(path) and len(path) > len(self._root):
            path = os.path.dirname(path)
        with self._counts.timed("syncing_s"):
            try:
                for directory, _, _ in _walked(path, deep=is_there):
                    _sync_directory(directory)
            except OSError as error:
                raise self._translate(prefix, error) from error

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Remove temporary files and empty directories below the directory, and the directory itself if it is empty."""
        path = self._directory(prefix)
        try:
            for directory, _, names in _walked(path, deep=deep):
                for name in filter(TEMPORARY_NAME.fullmatch, names):
                    with suppress(FileNotFoundError):
                        os.unlink(f"{directory}/{name}")
                if directory != self._root:
                    _remove_if_empty(directory)
        except OSError as error:
            raise self._translate(prefix, error) from error
        if deep:
            self.sync(prefix)
        else:
            _sync_directory(path)

    def _directory(self, prefix: str) -> str:
        return self._path_of(prefix.removesuffix("/")) if prefix else self._root


class FileWriter:
    """A file while it is being written, under a temporary name. The parts of aligned memory go past the page cache."""

    def __init__(
        self,
        path: str,
        parts: Parts,
        key: str,
        translate: Callable[[OSError | ValueError], ConnectorError],
        counts: WriteCounts,
    ) -> None:
        self._path, self._parts, self._key, self._translate, self._counts = path, parts, key, translate, counts
        self._temporary = _temporary_name(path)
        self._is_synced = False
        self._info: ObjectInfo | None = None
        self._direct: io.FileIO | None = None
        self._is_direct = True
        self._file = create_temporary(self._temporary)
        try:
            _allocate(self._file.fileno(), parts.size)
            with suppress(OSError):  # EINVAL: not on this file system
                self._direct = io.FileIO(self._temporary, "r+", opener=_open_direct)
        except BaseException:
            with suppress(ConnectorError):  # the first error says more
                self.abort()
            raise

    def write(self, start: int, data: memoryview) -> None:
        """Write one part; see `ObjectWriter.write`."""
        data = self._parts.checked(start, data)
        with self._counts.timed("writing_s", len(data)):
            try:
                num_written = self._write_direct(start, data)
                while num_written < len(data):
                    num_written += os.pwrite(self._file.fileno(), data[num_written:], start + num_written)
            except OSError as error:
                raise self._translate(error) from error
        self._parts.add(start)

    def _write_direct(self, start: int, data: memoryview) -> int:
        """Write the aligned part past the page cache; returns the number of bytes written, 0 where that cannot be done."""
        direct = self._direct if self._is_direct else None
        if direct is None or np.frombuffer(data, np.uint8).ctypes.data % _ALIGNMENT:
            return 0
        aligned, num_written = len(data) // _ALIGNMENT * _ALIGNMENT, 0
        while num_written < aligned and num_written % _ALIGNMENT == 0:
            try:
                num_written += os.pwrite(direct.fileno(), data[num_written:aligned], start + num_written)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # the file system asks for more
                break
        return num_written

    def commit(self) -> ObjectInfo:
        """Make the bytes durable and give the file its name; see `ObjectWriter.commit`."""
        if self._info is not None:
            return self._info
        self._parts.check_whole()
        if not self._is_synced:
            with self._counts.timed("syncing_s"):
                try:
                    os.fdatasync(self._file.fileno())
                except OSError as error:
                    # Never again: the kernel forgets the pages that it could not write, and a second call succeeds.
                    raise _not_durable(self._path, error) from error
            self._is_synced = True
        with self._counts.timed("committing_s"):
            try:
                _make_newer(self._file.fileno(), self._path)
                _rename(self._temporary, self._path, self._file.fileno())
                status = os.stat(self._path)
            except OSError as error:
                raise self._translate(error) from error
        self._close()
        self._info = ObjectInfo(self._key, status.st_size, etag_of(status.st_mtime_ns, status.st_size))
        return self._info

    def abort(self) -> None:
        """Remove the temporary file; see `ObjectWriter.abort`."""
        self._close()
        try:
            os.unlink(self._temporary)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._translate(error) from error

    def _close(self) -> None:
        with suppress(OSError):  # what matters is durable, or to be removed
            self._file.close()
        if self._direct is not None:
            self._direct.close()


def _temporary_name(path: str) -> str:
    """Hidden, beside the file; the temporary name of a hidden file begins with the file's name, so that its owner can
    be found."""
    directory, name = os.path.split(path)
    suffix = f".{secrets.token_hex(8)}.tmp"
    is_told = name.startswith(".") and len(os.fsencode(name + suffix)) <= _MAX_NAME
    return f"{directory}/{name if is_told else ''}{suffix}"


def _check_name(path: str) -> None:
    """Raise ValueError for a name that no file can have."""
    if b"\0" in os.fsencode(path):
        raise ValueError("a name without a NUL is needed")


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)


def _allocate(fd: int, size: int) -> None:
    """Allocate the blocks of a file, where the file system can. Raises OSError if the disk is full.

    Not `posix_fallocate`, which writes zeros where the file system cannot.
    """
    if size and _libc.fallocate(fd, 0, 0, size) and (number := ctypes.get_errno()) in _FULL:
        raise OSError(number, os.strerror(number))


def _make_directories(path: str) -> None:
    """Create a directory and those above it that are missing, each durable in the one above."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with suppress(FileExistsError):  # another writer's
            os.mkdir(directory)
        _sync_directory(os.path.dirname(directory))


def _no_place(error: OSError) -> str:
    """Why a file, or a directory above it, cannot be created."""
    name = os.fsdecode(error.filename or "")
    above = os.path.dirname(name)
    why = error.strerror or str(error)
    if error.errno == errno.ENOENT and os.path.isdir(above):  # as in /proc
        why = f"the file system of {above!r} has no place for it"
    return f"{name!r} cannot be made ({why}); choose another place"


def _sync_directory(path: str) -> None:
    """fsync a directory; one that is gone, or a file system that cannot, is no error. Raises ConnectorError."""
    try:
        with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise _not_durable(path, error) from error


def _walked(path: str, *, deep: bool) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` from the bottom up; without `deep` only this directory."""
    return os.walk(path, topdown=False, onerror=_raise) if deep else islice(os.walk(path, onerror=_raise), 1)


def _raise(error: OSError) -> None:
    """Raise an error of `os.walk`; a directory that vanished is no error."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def _not_durable(path: str, error: OSError) -> ConnectorError:
    return ConnectorError(
        f"{path!r} could not be made durable ({error.strerror or error}), so it may lack what was written: write it again"
    )


def _make_newer(fd: int, path: str) -> None:
    """Give a file a later time of change than the one it replaces, so that their etags differ."""
    with suppress(FileNotFoundError):
        old, new = os.stat(path), os.fstat(fd)
        if new.st_mtime_ns <= old.st_mtime_ns:
            os.utime(fd, ns=(new.st_atime_ns, old.st_mtime_ns + 1))


def _rename(temporary: str, path: str, fd: int) -> None:
    """Rename the open file `fd`; where the file system cannot, copy it.

    A bucket mounted by FUSE shows a file when it is closed, and replaces one then. Where the mount is set to refuse that, the
    existing file is removed first: a process that dies just then leaves neither.
    """
    try:
        os.replace(temporary, path)
        return
    except FileNotFoundError:
        # A server of NFS repeats a request whose answer was lost: the first one has renamed.
        if not os.path.lexists(path) or not os.path.samestat(os.stat(path), os.fstat(fd)):
            raise
        return
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
    before = _identity(path)
    try:
        _copy(temporary, path, "wb")
    except OSError as error:
        if before is None or error.errno not in _NO_OVERWRITE or _identity(path) != before:
            raise
        os.unlink(path)
        _copy(temporary, path, "xb")
    os.unlink(temporary)


def _copy(source_path: str, path: str, mode: str) -> None:
    """Copy a file, durably; after a failure a file that was there is as it was, or gone."""
    before = _identity(path)
    try:
        with open(source_path, "rb") as source, open(path, mode) as target:
            shutil.copyfileobj(source, target, PART_BYTES)
            target.flush()
            os.fsync(target.fileno())
    except FileExistsError:  # another process wrote it meanwhile
        raise
    except BaseException:
        if _identity(path) != before:
            with suppress(OSError):
                os.unlink(path)
        raise


def _identity(path: str) -> tuple[int, int] | None:
    """An identity that changes with the content of a file; None without a file."""
    with suppress(FileNotFoundError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    return None
