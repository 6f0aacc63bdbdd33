"""Stores that fail, die or lose their power at a counted call; and the points at which the tests let them."""

from __future__ import annotations

import errno
import os
import random
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
from crashing import DeadError, names_in
from fault_proxy import Fault, FaultProxy, Request
from fsspec.implementations.memory import MemoryFileSystem
from seaweed import Seaweed
from simulated_disk import Disk, SharedDisk, SharedFiles

from loaderkit.checkpoint.discovery.description import Format
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.s3 import S3Connector

BUCKET = "crashes"
_FILES = re.compile(
    r"step-(?P<step>\d+)/(?P<kind>\.metadata|loaderkit-state\.json|loaderkit-manifest\.json"
    r"|__\d+_(?P<dcp>\d+)(?P<distcp>\.distcp)|model(-\d+-of-\d+)?(\.(?P<whole>\d+))?(?P<safetensors>\.safetensors)"
    r"|model\.safetensors(?P<index>\.index\.json))"
)
_KINDS = ({".metadata", ".distcp"}, {"loaderkit-state.json", ".safetensors"})
_POLICY = RetryPolicy(total_s=2.0, max_attempts=3, first_wait_s=0.001)


class Point(NamedTuple):
    """Where a save is disturbed: the store, what happens, and after which part of its calls."""

    store: str
    fault: str
    again: bool  # it replaces a checkpoint
    writer: str  # a manager, one with `flush: process`, or a StreamWriter
    format: Format
    share: float

    def __str__(self) -> str:
        again = "again" if self.again else "new"
        return f"{self.store}-{self.fault}-{again}-{self.writer}-{self.format}-{self.share:.4f}"


NUM_POINTS = {
    ("file", "killed"): 150, ("file", "power"): 90, ("file", "power, some of it written"): 90,
    ("file", "full once"): 40, ("file", "full"): 40, ("file", "EIO once"): 40, ("file", "EIO"): 40,
    ("mount", "killed"): 90, ("mount", "EIO once"): 20, ("mount", "full"): 20,
    ("fsspec", "killed"): 60, ("fsspec", "EIO once"): 15, ("fsspec", "503 once"): 15, ("fsspec", "503"): 15,
    ("fsspec", "reset once"): 15, ("fsspec", "expired"): 10,
    ("s3", "killed"): 60, ("s3", "killed, answer lost"): 20, ("s3", "503 once"): 15, ("s3", "503"): 15,
    ("s3", "reset once"): 15, ("s3", "lost once"): 15, ("s3", "expired"): 10,
}  # fmt: skip


def points() -> list[Point]:
    """900 of them: of each kind, evenly over all calls of the sorts of saves. A third are of safetensors; where what happens to
    a process can be arranged from another, an eighth are of managers whose process writes."""
    found = []
    for (store, fault), num in NUM_POINTS.items():
        for number in range(num):
            again, writer = bool(number % 2), "stream" if number % 4 > 1 else "manager"
            if writer == "manager" and number // 4 % 4 == 3 and store != "fsspec" and not fault.startswith("power"):
                writer = "process"
            is_dcp = number // 4 % 3 != 1
            found.append(Point(store, fault, again, writer, "dcp" if is_dcp else "safetensors", (number + 0.5) / num))
    return found


def steps_in(names: list[str]) -> list[int]:
    """The steps of checkpoints. Fails if there is a part of one, a file of an earlier save of it, or anything else but the
    marker of an open manager."""
    found: dict[int, set[str]] = {}
    for name in names:
        if name.startswith(".saving-job."):
            continue
        match = _FILES.fullmatch(name)
        assert match is not None, names
        found.setdefault(int(match["step"]), set()).add(match["kind"])
    for step, there in found.items():
        matches = [_FILES.fullmatch(f"step-{step}/{name}") for name in there]
        kinds = {m["distcp"] or m["safetensors"] or m["index"] or m["kind"] for m in matches if m}
        saves = {int(m["dcp"] or m["whole"] or 0) for m in matches if m and (m["distcp"] or m["safetensors"])}
        assert len(saves) == 1, names
        assert kinds - {".index.json"} - {"loaderkit-manifest.json"} in _KINDS, names
        assert "loaderkit-manifest.json" in kinds, names
        assert (".index.json" in kinds) <= ("loaderkit-state.json" in kinds), names
    return sorted(found)


class World:
    """A store without anything in it, and what happens to it."""

    connector: Connector

    def arm(self, fault: str, last: int | None) -> None:
        """Begin to count calls; from number `last` on there is that fault. None: never."""
        raise NotImplementedError

    @property
    def num_calls(self) -> int:
        """Calls since `arm`."""
        raise NotImplementedError

    def settle(self, fault: str, rng: random.Random) -> None:
        """What happens after a death, and the end of the fault."""
        self.arm("", None)

    def names(self) -> list[str]:
        """All that is there."""
        return names_in(self.connector)


class DiskWorld(World):
    _ERRORS: ClassVar = {"full": errno.ENOSPC, "EIO": errno.EIO}

    def __init__(self, root: Path, *, renames: bool, is_shared: bool) -> None:
        self._files = FileConnector(root)
        if is_shared:
            shared = SharedDisk(root, root.with_name("state"), os.getpid(), renames=renames)
            self.disk: Disk = shared
            self.connector = RetryConnector(SharedFiles(shared), _POLICY)
        else:
            self.disk = Disk(root, renames=renames)
            self.connector = RetryConnector(self._files, _POLICY)

    def arm(self, fault: str, last: int | None) -> None:
        self.disk.fail(last, self._ERRORS.get(fault.removesuffix(" once")), is_lasting="once" not in fault)

    @property
    def num_calls(self) -> int:
        return self.disk.num_calls

    def settle(self, fault: str, rng: random.Random) -> None:
        super().settle(fault, rng)
        self.disk.revive()
        if fault.startswith("power"):
            self.disk.cut(rng if "some" in fault else None)
        for path in self.disk.root.glob(".*.tmp"):  # of a marker; the next save comes an hour later
            os.utime(path, (time.time() - 3600,) * 2)

    def names(self) -> list[str]:
        return names_in(self._files)


class _StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


_ERRORS: dict[str, Any] = {
    "killed": DeadError,
    "EIO": lambda: OSError(errno.EIO, "Input/output error"),
    "503": lambda: _StatusError(503),
    "expired": lambda: _StatusError(403),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
}


class _CountedMemory(MemoryFileSystem):  # type: ignore[misc]
    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the base
    pseudo_dirs = [""]  # noqa: RUF012
    num_calls: ClassVar[int] = 0
    last: ClassVar[int | None] = None
    fault: ClassVar[str] = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("counted://", "memory://", 1))
        return stripped

    def _count(self) -> None:
        cls = type(self)
        cls.num_calls += 1
        number = cls.num_calls - 1
        if cls.last is not None and (number == cls.last or (number > cls.last and "once" not in cls.fault)):
            raise _ERRORS[cls.fault.removesuffix(" once")]()


def _counted(name: str) -> Any:
    real = getattr(MemoryFileSystem, name)

    def call(self: _CountedMemory, *args: Any, **more: Any) -> Any:
        self._count()
        return real(self, *args, **more)

    return call


for _name in ("pipe_file", "rm_file", "rm", "find", "info", "cat_file", "makedirs"):
    setattr(_CountedMemory, _name, _counted(_name))
fsspec.register_implementation("counted", _CountedMemory, clobber=True)


class FsspecWorld(World):
    def __init__(self) -> None:
        self.connector = RetryConnector(FsspecConnector(f"counted://{uuid.uuid4().hex}"), _POLICY)

    def arm(self, fault: str, last: int | None) -> None:
        _CountedMemory.num_calls, _CountedMemory.last, _CountedMemory.fault = 0, last, fault

    @property
    def num_calls(self) -> int:
        return _CountedMemory.num_calls


class S3World(World):
    _FAULTS: ClassVar = {
        "killed": Fault(answer=(400, "InvalidRequest")),  # whatever comes after is not done
        "503": Fault(answer=(503, "SlowDown")),
        "reset": Fault(reset=True),
        "lost": Fault(lost=True),
        "expired": Fault(answer=(403, "ExpiredToken")),
    }

    def __init__(self, server: Seaweed, proxy: FaultProxy) -> None:
        self._prefix = f"{uuid.uuid4().hex}/"
        self._client, self._proxy = server.boto(), proxy
        args = S3Args(endpoint=proxy.endpoint, max_attempts=3)
        self.connector = S3Connector(f"s3://{BUCKET}/{self._prefix}", args, RetryArgs(total=2.0))

    def arm(self, fault: str, last: int | None) -> None:
        self._proxy.requests.clear()
        found = self._FAULTS.get(fault.partition(",")[0].removesuffix(" once"))

        def rule(request: Request) -> Fault | None:
            if last is None or request.number < last:
                return None
            if request.number > last:
                return None if "once" in fault else found
            return Fault(lost=True) if "answer lost" in fault else found

        self._proxy.rule = rule

    @property
    def num_calls(self) -> int:
        return len(self._proxy.requests)

    def names(self) -> list[str]:
        uploads = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=self._prefix).get("Uploads", [])
        return [*super().names(), *(f"{upload['Key']} (an upload)" for upload in uploads)]


@contextmanager
def made_world(store: str, server: Seaweed | None, *, is_shared: bool = False) -> Iterator[World]:
    """A store of that kind; `server` is asked for one that is a bucket. `is_shared`: other processes write to it, too."""
    if store == "fsspec":
        world: World = FsspecWorld()
        yield world
        world.connector.close()
    elif store == "s3":
        assert server is not None
        with FaultProxy(server.port) as proxy:
            world = S3World(server, proxy)
            yield world
            world.arm("", None)
            world.connector.close()
    else:
        with tempfile.TemporaryDirectory() as folder:
            (root := Path(folder, "files")).mkdir()
            world = DiskWorld(root, renames=store == "file", is_shared=is_shared)
            with world.disk.mounted():
                yield world
