"""A group of ranks with connections of its own, which names the rank at fault when a connection breaks.

All bytes go over gloo, in an order that all ranks have computed, by one thread a rank. A rank that fails writes why to the
store and closes its connections; the others notice at once, because their transfers break, read which rank it was, and close
theirs. A rank that died writes nothing: it is the one that does not answer the liveness check that the others start.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loaderkit.errors import PeerError
from loaderkit.ranks.store import listed

if dist.is_available():  # not in every build of torch
    from torch.distributed import distributed_c10d as c10d

_POLL_S = 0.5  # between looks into the store
_ANSWER_S = 5.0  # for the others to answer a liveness check
_FAREWELL_S = 2.0


class RankGroup:
    """The connections of this rank, number `rank` of the group. `global_ranks` are the ranks in torch.distributed."""

    def __init__(self, store: Any, load_id: str, global_ranks: Sequence[int], rank: int, *, timeout_s: float) -> None:
        """Connect all with all. Raises PeerError that names the ranks that did not come."""
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.doing = "connecting"
        self._timeout_s = timeout_s
        self._store = c10d.PrefixStore(f"loaderkit/{load_id}", store)
        self._gloo: Any = None
        try:
            self._store.set(f"joined/{rank}", "")
            connections = c10d.PrefixStore("gloo", self._store)
            self._gloo = dist.ProcessGroupGloo(connections, rank, len(global_ranks), timedelta(seconds=timeout_s))
            self._store.add("connected", 1)
        except RuntimeError as error:
            raise self._missing_error(error) from error

    def __len__(self) -> int:
        return len(self.global_ranks)

    def _missing_error(self, error: RuntimeError) -> PeerError:
        with suppress(RuntimeError):
            if (first := self._first()) is not None:
                return first
            missing = [n for n in range(len(self)) if not self._store.check([f"joined/{n}"])]
            if missing:
                return self._blame(missing, f"did not come to share the checkpoint within {self._timeout_s:g} s")
        return PeerError(f"the ranks could not be connected to share the checkpoint: {error}")

    # ------------------------------------------------------------------------------------------------- transfers

    def distribute(self, number: int, data: torch.Tensor, owner: int, ranks: Sequence[int]) -> None:
        """Send `data` (uint8, contiguous, CPU) from `owner` to the other `ranks`. These ranks, and no others, call it with
        the same `number`. Raises PeerError."""
        try:
            if len(ranks) == len(self):
                self._broadcast(data, owner)
            elif self.rank == owner:
                sent = [self._gloo.send([data], rank, number) for rank in ranks if rank != owner]
                for work in sent:
                    work.wait()
            else:
                self._gloo.recv([data], owner, number).wait()
        except RuntimeError as error:
            raise self._explained(error, owner) from error

    def exchange(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, by rank. Raises PeerError."""
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.global_ranks]
            self._gloo.allgather([sizes], [torch.tensor([len(data)])]).wait()
            received = []
            for rank, size in enumerate(sizes):
                message = torch.empty(int(size), dtype=torch.uint8)
                if rank == self.rank and data:
                    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if len(message):
                    self._broadcast(message, rank)
                received.append(message.numpy().tobytes())
            return received
        except RuntimeError as error:
            raise self._explained(error, None) from error

    def count_equal(self, tag: str) -> int:
        """The number of ranks, with this one, that gave the same `tag`. Raises PeerError."""
        mine = torch.tensor([int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7])])
        tags = [torch.zeros_like(mine) for _ in self.global_ranks]
        try:
            self._gloo.allgather([tags], [mine]).wait()
        except RuntimeError as error:
            raise self._explained(error, None) from error
        return sum(int(item) == int(mine) for item in tags)

    def _broadcast(self, data: torch.Tensor, owner: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        self._gloo.broadcast([data], options).wait()

    # ------------------------------------------------------------------------------------------------------ failures

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this rank, and close the connections."""
        if not isinstance(error, PeerError):
            with suppress(RuntimeError):
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self._store.compare_set("first", "", f"{self.rank}\nfailed: {reason}")
        # One that still connects would find a connection closed, and not get to what it would say itself.
        self._wait_for_all("connected")
        self._gloo = None

    def finish(self) -> None:
        """Return once every rank has called this, which it does when it has all its bytes. Raises PeerError."""
        self.doing = "done"
        self.exchange(b"")
        # A rank that closes its connections must not disturb others that still read the last message.
        with suppress(RuntimeError):
            self._store.add("done", 1)
        self._wait_for_all("done")
        self._gloo = None

    def _wait_for_all(self, what: str) -> None:
        """Wait until all ranks are counted there, for 2 s at most."""
        deadline_s = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):
            while self._store.add(what, 0) < len(self) and time.monotonic() < deadline_s:
                time.sleep(0.001)

    def watch(self, done: threading.Event, tick: Callable[[], None]) -> PeerError | None:
        """Answer liveness checks until `done`. Returns a failure of another rank that the transferring thread has not noticed.

        Called by the thread that waits for the transferring one. Returns None if there was no such failure.
        """
        while not done.wait(_POLL_S):
            tick()
            with suppress(RuntimeError):
                if self._store.check(["alarm"]):
                    self._answer()
                if (failed := self._first()) is not None and not done.wait(_ANSWER_S):
                    return failed
        return None

    def _answer(self) -> None:
        self._store.set(f"here/{self.rank}", self.doing)

    def _explained(self, error: RuntimeError, owner: int | None) -> PeerError:
        """The error that says why a transfer broke or timed out, and which rank is at fault."""
        self._gloo = None  # closes the connections, so that ranks that wait for this one notice
        try:
            return self._first() or self._check_liveness(error, owner)
        except RuntimeError:
            return PeerError(
                f"another rank is gone, and so is the store of torch.distributed: unless torchrun keeps it, that is rank 0's, "
                f"which has probably died ({_short(error)})",
                ranks=(0,),
            )

    def _first(self) -> PeerError | None:
        """The first failure that a rank has written to the store, if any."""
        if not self._store.check(["first"]):
            return None
        rank, _, reason = self._store.get("first").decode().partition("\n")
        return self._blame([int(rank)], reason) if rank else None

    def _check_liveness(self, error: RuntimeError, owner: int | None) -> PeerError:
        """Ask all ranks for an answer; returns the error that names the ranks at fault."""
        self._store.set("alarm", "1")
        self._answer()
        deadline_s = time.monotonic() + min(_ANSWER_S, self._timeout_s)
        absent = [*range(len(self))]
        while absent and time.monotonic() < deadline_s:
            time.sleep(0.02)
            if (first := self._first()) is not None:
                return first
            absent = [n for n in absent if not self._store.check([f"here/{n}"])]
        if len(absent) > 1:
            return self._blame(absent, "do not answer any more: they have probably died")
        if absent:
            blamed, reason = absent[0], "does not answer any more: it has probably died"
        elif owner is not None and owner != self.rank:
            doing = self._store.get(f"here/{owner}").decode()
            blamed = owner
            reason = f"did not pass on what it reads within {self._timeout_s:g} s; it is {doing} ({_short(error)})"
        else:
            return PeerError(f"a connection between ranks broke, and all of them still answer: {_short(error)}")
        self._store.compare_set("first", "", f"{blamed}\n{reason}")  # so that all ranks name the same
        return self._first() or self._blame([blamed], reason)

    def _blame(self, blamed: Sequence[int], reason: str) -> PeerError:
        ranks = tuple(self.global_ranks[n] for n in blamed)
        return PeerError(
            f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {reason}. This rank has not received all its bytes",
            ranks=ranks,
        )


def _short(error: BaseException) -> str:
    """The first sentence of a message of gloo, without the source line."""
    return str(error).rpartition("] ")[2].partition(". ")[0][:200] or type(error).__name__
