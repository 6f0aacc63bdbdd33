"""Brings what the node before this one has written into this node's folder, behind training, in rounds.

node 0: the newest step ──> posted ──> all: .copying-STEP/ ──> replicas/STEP/ ──> posted: how it went ──> node 0: the next round
                                            files, each block compared with the manifest, a part at a time

All nodes copy the same step, so that one step after the other is there twice whole. The step of the last such round, and that
of the one that is under way, stay in `local`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import xxhash

from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit._internal.units import say_seconds, say_size
from loaderkit.checkpoint.contents import Checksums
from loaderkit.checkpoint.discovery.manifest import NAME, parse_manifest
from loaderkit.checkpoint.nodes.folder import COPYING, OWN, REPLICAS, NodeFolder, decoded
from loaderkit.checkpoint.nodes.server import NodeClient
from loaderkit.connectors.base import ObjectInfo
from loaderkit.errors import CheckpointError, ConnectorError, PeerError
from loaderkit.ranks.board import Board

logger = logging.getLogger("loaderkit")
_ALIGNMENT = 4096
_CLOSE_S = 10.0
_DOING = "the nodes copy one another's checkpoints"


class Replication:
    """The replicas of node `source` in `folder`, made by one thread that is there while there is something to do.

    Steps that come while one is being copied wait, and the newest of them is next. What fails is a warning: the step is
    committed all the same. Memory: one part of a file, 8 MiB.
    """

    def __init__(
        self,
        folder: NodeFolder,
        source: NodeClient,
        board: Board,
        firsts: Sequence[int],
        *,
        last: str,
        replicated: Callable[[], None],
    ) -> None:
        """`firsts` are the ranks that do this, of each node one. `last`: the newest whole step, which stays. `replicated` is
        called on the first node when all nodes have a step's replicas."""
        self._folder, self._source, self._board, self._firsts = folder, source, board, firsts
        self._replicated = replicated
        self._lock = threading.Lock()
        self._names: list[str] = []  # of what was committed and is not in a round yet
        self._num_seen = self._num_covered = self._num_rounds = 0
        self._last, self._current = last, ""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stats = {"num_replicated": 0, "num_failed_replicas": 0, "replicated_bytes": 0, "replica_s": 0.0}

    def add(self, name: str) -> None:
        """The step in the directory `name` is committed on all nodes; all are told of all steps in the same order."""
        with self._lock:
            self._names.append(name)
            self._num_seen += 1
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="loaderkit-replica", daemon=True)
                with suppress(ProgramEndsError):
                    start_thread(thread)
                    self._thread = thread

    def stays(self) -> set[str]:
        """Of the first node: the steps that are not to be removed for a newer one."""
        with self._lock:
            return {self._last, self._current, *self._names[-1:]}

    def finish(self, within_s: float | None = None) -> None:
        """Return once nothing is to be copied, or after `within_s`."""
        end_s = None if within_s is None else time.monotonic() + within_s
        while (thread := self._running()) is not None:
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                return
            thread.join(left_s)

    def stats(self) -> dict[str, float]:
        """Counts, bytes and seconds."""
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        """Break off what is being copied. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _running(self) -> threading.Thread | None:
        with self._lock:
            return self._thread

    def _run(self) -> None:
        try:
            while self._is_behind():
                self._round()
        except (PeerError, RuntimeError) as error:  # the job ends
            logger.debug("no replicas are made any more: %s", error)
            with self._lock:
                self._closed, self._thread = True, None

    def _is_behind(self) -> bool:
        with self._lock:
            if self._num_seen > self._num_covered and not self._closed:
                return True
            self._thread = None
            return False

    def _round(self) -> None:
        """One step, on all nodes."""
        board, key = self._board, f"replicas-{self._num_rounds}"
        self._num_rounds += 1
        if board.rank == self._firsts[0]:
            with self._lock:
                covered, self._current, self._names = self._num_seen, self._names[-1], []
            board.post(f"{key}/step", json.dumps([covered, self._current]).encode())
            name = self._current
        else:
            covered, name = json.loads(board.wait_for(f"{key}/step", self._firsts[0], about=key, doing=_DOING))
        with board.alive(key):
            is_made = self._make(name)
        board.post(f"{key}/made/{board.rank}", b"1" if is_made else b"")
        if board.rank == self._firsts[0]:
            made = [board.wait_for(f"{key}/made/{one}", one, about=key, doing=_DOING) for one in self._firsts]
            board.remove(
                [f"{key}/step", *(f"{key}/{what}/{one}" for what in ("made", "alive") for one in self._firsts)]
            )
            with self._lock:
                self._last, self._current = name if all(made) else self._last, ""
            self._replicated()
        with self._lock:
            self._num_covered = covered

    def _make(self, name: str) -> bool:
        """True if the replica of a step is whole here."""
        begin_s = time.perf_counter()
        try:
            num_bytes = self._copy(name)
        except Exception as error:
            with self._lock:
                self._stats["num_failed_replicas"] += 1
            logger.warning("there is no replica of %s in %s: %s", name, self._folder.path, error)
            return False
        took_s = time.perf_counter() - begin_s
        with self._lock:
            self._stats["num_replicated"] += 1
            self._stats["replicated_bytes"] += num_bytes
            self._stats["replica_s"] += took_s
        logger.debug("%s: a replica of %s in %s", name, say_size(num_bytes), say_seconds(took_s))
        return True

    def _copy(self, name: str) -> int:
        """Make the replica of a step; the bytes that were copied. Raises ConnectorError, FormatError, CheckpointError."""
        writes = self._folder.writes
        self._sweep()
        listing = decoded(self._source.call("list", f"{name}/"))
        infos = {info.key[len(name) + 1 :]: info for info in listing.files[OWN]}
        if NAME not in infos:
            raise CheckpointError("it was removed meanwhile")
        manifest = bytearray(infos[NAME].size)
        self._source.read(f"{name}/{NAME}", 0, memoryview(manifest))
        *_, checksums = parse_manifest(name, manifest)
        copying, final = f"{REPLICAS}{COPYING}{name}/", f"{REPLICAS}{name}/"
        for other in infos.keys() - {NAME}:
            self._copy_file(infos[other], copying + other, checksums.get(other))
        writes.put(copying + NAME, manifest)
        writes.sync(copying)
        self._remove(final)  # of another save of this step
        if not writes.rename(copying, final):
            raise ConnectorError("the file system cannot rename directories")
        if not os.path.exists(f"{self._folder.path}/{name}/{NAME}"):
            self._remove(final)  # retention came first
        return sum(info.size for info in infos.values())

    def _copy_file(self, info: ObjectInfo, key: str, known: Checksums | None) -> None:
        """Copy a file, and compare its blocks; files beside the checkpoint's own have no checksums."""
        if known is not None and known.num_bytes != info.size:
            raise CheckpointError(f"{info.key} has {info.size} bytes, and {known.num_bytes} were written")
        writes = self._folder.writes
        part_bytes = writes.part_bytes_of(info.size)
        memory = np.empty(min(part_bytes, info.size) + _ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNMENT :]  # written past the page cache
        writer = writes.create(key, info.size)
        try:
            for start in range(0, info.size, part_bytes):
                if self._closed:
                    raise ConnectorError("this CheckpointManager is closed")
                part = memory[: min(part_bytes, info.size - start)]
                self._source.read(info.key, start, part.data)
                if known is not None:
                    _compare(info, known, start, part.data)
                writer.write(start, part.data)
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def _sweep(self) -> None:
        """Remove replicas of steps that are gone, and what was not completed."""
        with suppress(FileNotFoundError):
            for name in os.listdir(f"{self._folder.path}/{REPLICAS}"):
                if name.startswith(COPYING) or not os.path.exists(f"{self._folder.path}/{name}/{NAME}"):
                    self._remove(f"{REPLICAS}{name}/")

    def _remove(self, prefix: str) -> None:
        """Remove a directory, its manifest first."""
        self._folder.writes.delete(prefix + NAME)
        self._folder.writes.sync(prefix)
        shutil.rmtree(f"{self._folder.path}/{prefix}", ignore_errors=True)


def _compare(info: ObjectInfo, known: Checksums, start: int, part: memoryview) -> None:
    """Raise CheckpointError unless the blocks of a part, which begins with one, are those of the manifest."""
    block = known.block_bytes
    for lo in range(0, len(part), block):
        if xxhash.xxh3_64_hexdigest(part[lo : lo + block]) != known.hashes[(start + lo) // block]:
            raise CheckpointError(f"{info.key} is damaged: bytes from {start + lo} on are not those of its manifest")
