"""A cache folder on a local disk, shared by any number of processes.

    objects/<2 digits>/<64 digits>   an entry: its bytes, then a trailer with a checksum for every 64 KiB
    temporary/                       entries being written; each is locked by its writer, so that a dead writer's can be told
    lock                             bytes of it are locked: one for the account, one for every entry being fetched
    usage                            the account: the bytes in use, corrected whenever all files are scanned

A name is a digest, so the name of an object never becomes a path. An entry appears by rename, complete; the kernel drops the
locks of a process that dies. So a crash does no harm at any moment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from loaderkit._internal.system.interrupts import opened
from loaderkit.connectors.layers.disk_account import OPEN, DiskAccount

logger = logging.getLogger("loaderkit")

_PAGE_BYTES = 64 << 10
_HEAD = struct.Struct("<8s32sQ")  # magic, digest, number of bytes; then the checksums of the pages and of all that
_MAGIC = b"LKpiece1"
_FIRST_ENTRY = 1 << 10  # the first byte of `lock` that is used for entries
_SUSPENDED_S = 30.0
_TOUCH_NS = 10**9


def entry_name(*parts: str | int) -> str:
    """The name of the entry identified by `parts`: 64 hexadecimal digits."""
    text = "\0".join(f"{len(str(part))}:{part}" for part in parts)
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=32).hexdigest()


class DiskCache:
    """A cache of at most `size_bytes` in `folder`, for any number of threads. On a full or failing disk reads miss, writes do
    nothing, and both log a warning once per suspension. `clock` gives the time of day in s."""

    def __init__(
        self, folder: str | Path, size_bytes: int, *, verify: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = os.path.abspath(folder)
        self._account = DiskAccount(self.folder, size_bytes)
        self.verify = verify
        self._clock = clock
        self._suspended_until_s = 0.0
        self.num_damaged = 0
        self.num_failures = 0

    @property
    def num_evicted(self) -> int:
        """Entries that this process evicted."""
        return self._account.num_evicted

    # ------------------------------------------------------------------------------------------------------- reading

    def read(self, name: str, whole_bytes: int, start: int, buffer: memoryview) -> bool:
        """Fill `buffer` with an entry's bytes from `start` on; False if there is none. `whole_bytes` is its size.

        A damaged entry is removed and counts as absent.
        """
        path = self._path(name)
        is_open = False
        try:
            with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
                is_open = True
                is_good = self._read(fd, name, whole_bytes, start, buffer)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note_failure("read", error)
            if not is_open:
                return False
            is_good = False  # a bad sector, say
        if not is_good:
            self.num_damaged += 1
            with suppress(OSError):
                os.unlink(path)
        return is_good

    def has(self, name: str) -> bool:
        """True if an entry exists, damaged or not."""
        return os.path.exists(self._path(name))

    def _read(self, fd: int, name: str, whole_bytes: int, start: int, buffer: memoryview) -> bool:
        status = os.fstat(fd)
        num_pages = -(-whole_bytes // _PAGE_BYTES)
        num_trailing = _HEAD.size + 4 * num_pages + 4
        if status.st_size != whole_bytes + num_trailing:
            return False
        first, last = start // _PAGE_BYTES, (start + len(buffer) - 1) // _PAGE_BYTES
        begin, end = first * _PAGE_BYTES, min((last + 1) * _PAGE_BYTES, whole_bytes)
        if not self.verify:
            begin, end = start, start + len(buffer)
        # The rest of the first and of the last page is read for their checksums only.
        before, behind = bytearray(start - begin), bytearray(end - start - len(buffer))
        trailer = os.pread(fd, num_trailing, whole_bytes)
        if not _read_all(fd, begin, [memoryview(before), buffer, memoryview(behind)]):
            return False
        self._touch(fd, status)
        head = _HEAD.pack(_MAGIC, bytes.fromhex(name), whole_bytes)
        if trailer[: len(head)] != head:
            return False
        if not self.verify:
            return True
        if crc32(trailer[:-4]) != int.from_bytes(trailer[-4:], "little"):
            return False
        sums = memoryview(trailer)[len(head) : -4].cast("I")
        return all(
            sums[page] == _sum_of(page * _PAGE_BYTES - begin, _PAGE_BYTES, before, buffer, behind)
            for page in range(first, last + 1)
        )

    def _touch(self, fd: int, status: os.stat_result) -> None:
        """Update an entry's access time, which many mounts (noatime, relatime) do not do on a read."""
        now_ns = int(self._clock() * 1e9)
        if now_ns - status.st_atime_ns > _TOUCH_NS:
            with suppress(OSError):
                os.utime(fd, ns=(now_ns, status.st_mtime_ns))

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, name: str, data: memoryview) -> bool:
        """Keep an entry, if there is room; returns True if it is kept. Never raises OSError."""
        if self._clock() < self._suspended_until_s:
            return False
        sums = [crc32(data[at : at + _PAGE_BYTES]) for at in range(0, len(data), _PAGE_BYTES)]
        trailer = _HEAD.pack(_MAGIC, bytes.fromhex(name), len(data)) + struct.pack(f"<{len(sums)}I", *sums)
        trailer += crc32(trailer).to_bytes(4, "little")
        num_bytes = len(data) + len(trailer)
        try:
            self._prepare()
            if not self._account.reserve(num_bytes):
                return False
            try:
                self._write_file(name, data, trailer)
            except BaseException:
                self._account.charge(-num_bytes)
                raise
        except OSError as error:
            self._note_failure("written to", error)
            return False
        return True

    def _prepare(self) -> None:
        for part in ("objects", "temporary"):
            os.makedirs(f"{self.folder}/{part}", exist_ok=True)

    def _write_file(self, name: str, data: memoryview, trailer: bytes) -> None:
        temporary = f"{self.folder}/temporary/{secrets.token_hex(12)}"
        try:
            with opened(temporary, OPEN | os.O_CREAT | os.O_EXCL) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)  # marks that the writer is alive
                os.ftruncate(fd, len(data) + len(trailer))  # so that a scan counts the final size
                _write_all(fd, [data, memoryview(trailer)])
                path = self._path(name)
                try:
                    os.rename(temporary, path)
                except FileNotFoundError:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _note_failure(self, operation: str, error: OSError) -> None:
        self.num_failures += 1
        now_s = self._clock()
        if now_s >= self._suspended_until_s:
            logger.warning(
                "the cache in %s cannot be %s (%s): continuing without it for %g s; free some space, or name another disk in "
                "source.cache.dir",
                self.folder,
                operation,
                error.strerror or error,
                _SUSPENDED_S,
            )
            self._suspended_until_s = now_s + _SUSPENDED_S

    def _path(self, name: str) -> str:
        return f"{self.folder}/objects/{name[:2]}/{name}"

    # --------------------------------------------------------------------------------------------------------- locks

    @contextmanager
    def fetching(self, name: str, *, wait_s: float) -> Iterator[bool]:
        """Hold the right to fetch an entry, exclusive among threads and processes. False if another holds it after `wait_s`.

        Without file locks every thread may fetch.
        """
        with ExitStack() as stack:
            is_ours = True
            try:
                self._prepare()
                stack.enter_context(self._account.locks.hold(_FIRST_ENTRY + int(name[:14], 16), wait_s))
            except BlockingIOError:
                is_ours = False
            except OSError:
                pass
            yield is_ours


def _sum_of(start: int, num_bytes: int, *parts: bytearray | memoryview) -> int:
    """The checksum of at most `num_bytes` from `start` on of the concatenated parts."""
    checksum, end, begin = 0, start + num_bytes, 0
    for part in parts:
        lo, hi = max(start - begin, 0), min(end - begin, len(part))
        if lo < hi:
            checksum = crc32(memoryview(part)[lo:hi], checksum)
        begin += len(part)
    return checksum


def _read_all(fd: int, start: int, parts: list[memoryview]) -> bool:
    """Fill the parts in order from offset `start` on; False if the file ends first."""
    remaining = [part for part in parts if len(part)]
    while remaining:
        num_read = os.preadv(fd, remaining, start)
        if not num_read:
            return False
        start += num_read
        remaining = _behind(remaining, num_read)
    return True


def _write_all(fd: int, parts: list[memoryview]) -> None:
    remaining = [part for part in parts if len(part)]
    while remaining:
        remaining = _behind(remaining, os.writev(fd, remaining))


def _behind(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if parts and num_bytes else parts
