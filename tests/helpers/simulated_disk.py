"""A disk that fails, fills up, dies or loses its power at a counted call: what `FileConnector` asks of the system to write.

While a `Disk` is mounted its calls go through it, and are done in a real directory. It knows what a power cut would leave, by
what POSIX promises: the bytes of a file as they were at its last fdatasync, and of the changes of a directory those before its
last fsync. Later ones may be there or not: for each directory as many as a random number says, in their order.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import os
import random
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from crashing import DeadError

from loaderkit._internal.temporary_files import create_temporary
from loaderkit.connectors import file_writes
from loaderkit.connectors.file import FileConnector

_PART_BYTES = 32 << 10  # so that small files have several parts
# Those that take room on the disk.
_GROWING = ("allocate", "mkdir", "create", "pwrite", "copy")


class _File:
    """What is durable of a file's bytes; None: nothing."""

    def __init__(self, durable: bytes | None = None) -> None:
        self.durable = durable


class _Folder:
    """The entries of a directory when all before were durable, and the changes since; the first `num_durable` of them are."""

    def __init__(self) -> None:
        self.now: dict[str, _File | _Folder] = {}
        self._before: dict[str, _File | _Folder] = {}
        self._changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, entries: dict[str, _File | _Folder | None]) -> None:
        """Give names to what is new or moved; None: remove."""
        self._changes.append(entries)
        self.now = _changed(self.now, entries)

    def sync(self) -> None:
        self._before, self._changes = dict(self.now), []

    def after_cut(self, rng: random.Random | None) -> dict[str, _File | _Folder]:
        """The entries that survive."""
        entries = self._before
        for change in self._changes[: rng.randint(0, len(self._changes)) if rng else 0]:
            entries = _changed(entries, change)
        return entries


def _changed(entries: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in (entries | change).items() if node is not None}


class Disk:
    """The directory `root`, which is there. `last`: from that call on it is dead, or fails with `error`: once, or each time.

    `renames`: False as a bucket that is mounted: it shows a file when it is closed, and renames none.
    """

    def __init__(self, root: Path, *, renames: bool = True) -> None:
        self.root = root
        self.renames = renames
        self.calls: list[str] = []
        self.is_dead = False
        self._last: int | None = None
        self._error: int | None = None
        self._is_lasting = False
        self._lock = threading.RLock()
        self._top = _Folder()
        self._open: dict[int, _File | _Folder] = {}

    def fail(self, last: int | None, error: int | None = None, *, is_lasting: bool = False) -> None:
        """Begin to count, and fail or die at that call; None: never."""
        self.calls, self._last, self._error, self._is_lasting = [], last, error, is_lasting

    @property
    def num_calls(self) -> int:
        """Calls since `fail`."""
        return len(self.calls)

    def revive(self) -> None:
        """The disk of a process that has died is another's."""
        self.is_dead = False

    def run(self, name: str, operation: Callable[[], Any], half: Callable[[], Any] = int) -> Any:
        """Count a call and do it. `half` does a part of it, for a process that dies in it."""
        with self._lock:
            if self.is_dead:
                raise DeadError
            self.calls.append(name)
            number = len(self.calls) - 1
            if self._last is None or number < self._last:
                return operation()
            if self._error is None:
                self.is_dead = True
                half()
                raise DeadError
            is_meant = self._error != errno.ENOSPC or name in _GROWING
            if not is_meant and number == self._last and not self._is_lasting:
                self._last += 1  # the next one that can
            if is_meant and (self._is_lasting or number == self._last):
                raise OSError(self._error, os.strerror(self._error))
            return operation()

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """While the block runs, all FileConnectors write to this disk."""
        names = ("os", "io", "open", "opened", "create_temporary", "_libc", "shutil", "PART_BYTES")
        before = {name: vars(file_writes).get(name) for name in names}
        system = _System(self)
        replaced = (
            system,
            system,
            system.open_file,
            system.opened,
            system.create_temporary,
            system,
            system,
            _PART_BYTES,
        )
        for name, value in zip(names, replaced, strict=True):
            setattr(file_writes, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    delattr(file_writes, name)
                else:
                    setattr(file_writes, name, value)

    # ------------------------------------------------------------------------------------------------ what there is

    def node(self, path: str) -> Any:
        """The file or directory of a path; None outside the disk."""
        parts = os.path.relpath(path, self.root).split("/")
        if parts[0] == "..":
            return None
        node: Any = self._top
        for part in parts:
            node = node if part == "." else node.now[part]
        return node

    def change(self, path: str, node: _File | _Folder | None, old: str | None = None) -> None:
        """Give a path to what is new, or was at `old`, or to nothing."""
        before: dict[str, Any] = {} if old is None else {os.path.basename(old): None}
        self.node(os.path.dirname(path)).change(before | {os.path.basename(path): node})

    def note(self, descriptor: int, node: Any) -> None:
        self._open[descriptor] = node

    def make_durable(self, descriptor: int) -> None:
        node = self._open.get(descriptor)
        if isinstance(node, _Folder):
            node.sync()
        elif node is not None:
            node.durable = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def cut(self, rng: random.Random | None) -> None:
        """Lose what is not durable; with `rng`, not all of it. The disk goes on."""
        after = self.root.with_name(f"{self.root.name}.after")
        top = _restored(self._top, after, rng)
        shutil.rmtree(self.root)
        after.rename(self.root)
        self._top, self._open = top, {}


def _restored(folder: _Folder, path: Path, rng: random.Random | None) -> _Folder:
    """Make the directory as it is after a cut."""
    path.mkdir()
    new = _Folder()
    for name, node in folder.after_cut(rng).items():
        if isinstance(node, _Folder):
            new.now[name] = _restored(node, path / name, rng)
            continue
        # Of bytes that are not durable, only the length may be.
        content = node.durable if node.durable is not None else bytes(rng.choice([0, 100]) if rng else 0)
        (path / name).write_bytes(content)
        new.now[name] = _File(content)
    new.sync()
    return new


class SharedDisk(Disk):
    """A disk to which several processes write, whose state is in the file `state`. Only calls of processes other than `owner`
    count, and fail or kill the process. What is durable is not known of it."""

    def __init__(self, root: Path, state: Path, owner: int, *, renames: bool = True) -> None:
        super().__init__(root, renames=renames)
        self.state, self.owner = state, owner
        if not state.exists():
            state.write_text(json.dumps([0, None, None, False, False]))

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """With its state, while no other process is in such a block."""
        with open(self.state, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            num_calls, self._last, self._error, self._is_lasting, self.is_dead = json.loads(file.read())
            self.calls = [""] * num_calls
            try:
                yield
            finally:
                file.seek(0)
                file.truncate()
                json.dump([len(self.calls), self._last, self._error, self._is_lasting, self.is_dead], file)

    def fail(self, last: int | None, error: int | None = None, *, is_lasting: bool = False) -> None:
        with self._lock, self._shared():
            super().fail(last, error, is_lasting=is_lasting)

    @property
    def num_calls(self) -> int:
        with self._lock, self._shared():
            return len(self.calls)

    def revive(self) -> None:
        with self._lock, self._shared():
            super().revive()

    def run(self, name: str, operation: Callable[[], Any], half: Callable[[], Any] = int) -> Any:
        if os.getpid() == self.owner:
            return operation()
        try:
            with self._lock, self._shared():
                return super().run(name, operation, half)
        except DeadError:
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    def node(self, path: str) -> None:
        """Not known."""

    def change(self, path: str, node: _File | _Folder | None, old: str | None = None) -> None:
        """Not noted."""


class SharedFiles(FileConnector):
    """The files of such a disk. Where it is sent to, all files are written to the disk from then on."""

    def __init__(self, disk: SharedDisk) -> None:
        super().__init__(disk.root)
        self._disk = disk

    def __reduce__(self) -> Any:
        return _sent, (self._disk.root, self._disk.state, self._disk.owner, self._disk.renames)


def _sent(root: Path, state: Path, owner: int, renames: bool) -> SharedFiles:
    disk = SharedDisk(root, state, owner, renames=renames)
    if os.getpid() != owner:
        _MOUNTED.enter_context(disk.mounted())
    return SharedFiles(disk)


_MOUNTED = ExitStack()  # until the process ends


class _System:
    """`os`, `io`, `open`, `shutil` and the C library, as `file_writes` uses them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # Names and directories.

    def mkdir(self, path: str) -> None:
        def make() -> None:
            os.mkdir(path)
            self._disk.change(path, _Folder())

        self._disk.run("mkdir", make)

    def rmdir(self, path: str) -> None:
        self._remove("rmdir", os.rmdir, path)

    def unlink(self, path: str) -> None:
        self._remove("unlink", os.unlink, path)

    def _remove(self, name: str, remove: Callable[[str], None], path: str) -> None:
        def removed() -> None:
            remove(path)
            self._disk.change(path, None)

        self._disk.run(name, removed)

    def rename(self, old: str, new: str) -> None:
        def renamed() -> None:
            assert os.path.dirname(old) == os.path.dirname(new), "what a power cut leaves of this is not simulated"
            if not self._disk.renames:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            node = self._disk.node(old)
            os.rename(old, new)
            self._disk.change(new, node, old)

        self._disk.run("rename", renamed)

    replace = rename

    # Files.

    def FileIO(self, path: str, mode: str, opener: Any) -> io.FileIO:
        return io.FileIO(path, mode, opener=opener)

    def create_temporary(self, path: str) -> Any:
        def create() -> io.FileIO:
            file = create_temporary(path)
            self._disk.change(path, node := _File())
            self._disk.note(file.fileno(), node)
            return file

        return self._disk.run("create", create)

    def open_file(self, path: str, mode: str) -> Any:
        """As a mounted bucket does it: what is written is there when it is closed."""
        if mode == "rb":
            return open(path, mode)
        if "x" in mode and os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self._disk.run("create", lambda: _Upload(self._disk, path))

    def copyfileobj(self, source: Any, target: Any, length: int) -> None:
        target.is_whole = False
        self._disk.run("copy", lambda: shutil.copyfileobj(source, target, length))
        target.is_whole = True

    def fallocate(self, descriptor: int, mode: int, offset: int, length: int) -> int:
        try:
            self._disk.run("allocate", int)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        return 0

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        written: int = self._disk.run(
            "pwrite",
            lambda: os.pwrite(descriptor, data, offset),
            lambda: os.pwrite(descriptor, data[: len(data) // 2 // 4096 * 4096], offset),
        )
        return written

    # What makes durable.

    def fsync(self, descriptor: int) -> None:
        def sync() -> None:
            self._disk.make_durable(descriptor)

        self._disk.run("fsync", sync)

    fdatasync = fsync

    @contextmanager
    def opened(self, path: str, flags: int) -> Iterator[int]:
        descriptor = os.open(path, flags)
        self._disk.note(descriptor, self._disk.node(path))
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class _Upload(io.FileIO):
    """A file of a mounted bucket: it has its name when it is closed, unless a write has failed."""

    is_whole = True

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._hidden = disk.root.with_name(f"upload-{secrets.token_hex(8)}")
        super().__init__(self._hidden, "x+")
        disk.note(self.fileno(), None)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self.is_whole:
                self._disk.run("close", self._show)

    def _show(self) -> None:
        os.replace(self._hidden, self._path)
        self._disk.change(self._path, _File(Path(self._path).read_bytes()))
