"""Connections between the ranks that need the same batches: what the first of them sends goes down a tree to all others.

All bytes go over a gloo group of these ranks alone, whose name they agree on in the store of torch.distributed; no other rank
takes part, and no group of training is used. A send waits until its receiver is ready, for as long as that takes. The
death of a rank breaks its connections at once; the death of its machine shows in the store, where every rank leaves
signs of life. The first rank that notices a death writes it to the store, so that all ranks name the same rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from loaderkit.errors import ClosedError, ConfigError, PeerError
from loaderkit.ranks.store import default_store, listed, own_connection

if dist.is_available():  # not in every build of torch
    from torch.distributed import distributed_c10d as c10d

_NUM_CHILDREN = 2  # of a rank in the tree: the first rank sends two copies, however many ranks there are
_FOREVER = timedelta(days=30)
_CUT_TAG = 2**20  # of a message that no rank sends
_BEAT_S = 5.0  # between two signs of life
_CONNECT_S = 60.0  # for ranks that are all there
_FAREWELL_S = 2.0
_MAX_CHARACTERS = 1000  # of an error, in the message of a rank that has left
_BEFORE_TIMEOUT = 0.75  # of the timeout, where waits raise at it: the rank is named before
_READY = "ready"  # what a rank says before all connect, unless it has said why it leaves
_FIRST_POLL_S, _MAX_POLL_S = 0.002, 0.1
_PATIENT = 10  # times the timeout: how long a rank that has not begun is waited for, unless waits are to raise

logger = logging.getLogger("loaderkit")


class PeerChannel:
    """The connections of rank number `number` of `peers`, which are ranks of torch.distributed.

    `begin` comes first. `connect`, `send` and `receive` are for one thread, `leave` for any other.
    """

    def __init__(self, peers: Sequence[int], number: int, name: str, *, timeout_s: float, raises: bool) -> None:
        """`name` is the same on all of them. `raises`: a rank that does not answer is given up after `timeout_s`;
        without it later."""
        self.peers = tuple(peers)
        self.number = number
        self.parent = (number - 1) // _NUM_CHILDREN
        first = _NUM_CHILDREN * number + 1
        self.children = range(first, min(first + _NUM_CHILDREN, len(self.peers)))
        self._name = name
        self._begin_s = timeout_s if raises else _PATIENT * timeout_s
        self._silence_s = _BEFORE_TIMEOUT * timeout_s if raises else 5 * timeout_s
        self._warn_s = timeout_s
        self._store: Any = None
        self._gloo: Any = None
        self._lock = threading.Lock()  # of `_gloo`
        self._farewell = (number, "has left the loop before this one")  # the rank at fault, and the reason
        self._has_left = threading.Event()
        self.failure: PeerError | None = None  # of a rank, as soon as it is known
        self._reasons: dict[str, tuple[int, str]] = {}  # by the text of an error: the rank at fault, and why
        self._watcher: threading.Thread | None = None

    @property
    def reader(self) -> int:
        """The rank that reads for all."""
        return self.peers[0]

    def begin(self) -> None:
        """Agree with the others which connections are meant: on every rank the n-th of these ranks and this name, as they take
        the same steps. Raises ConfigError without torch.distributed."""
        digest = blake2b(repr((self.peers, self._name)).encode(), digest_size=12).hexdigest()
        root = own_connection(default_store(), f"loaderkit/share/{digest}")
        self._store = c10d.PrefixStore(str(root.add(f"times/{self.number}", 1)), root)
        self._store.set(f"beat/{self.number}", "0")
        watcher = threading.Thread(target=self._watch, name="loaderkit-share-watch", daemon=True)
        watcher.start()
        self._watcher = watcher

    def connect(self, about: Mapping[str, str]) -> None:
        """Connect with the others; `about` has to be the same on all ranks. Raises ConfigError that names a difference,
        PeerError that names the ranks that did not come, and ClosedError after `leave`."""
        self._store.set(f"joined/{self.number}", "\n".join(f"{key}\t{value!r}" for key, value in about.items()))
        self._await_all("joined", may_leave=True)
        self._check_same([self._store.get(f"joined/{n}").decode() for n in range(len(self.peers))])
        # From here on none leaves before it has connected: gloo would wait for it, and nothing can end that.
        if self._store.compare_set(f"ready/{self.number}", "", _READY) != _READY.encode():
            raise _closed()
        self._await_all("ready", may_leave=False)
        for n in range(len(self.peers)):
            if (said := self._store.get(f"ready/{n}").decode()) != _READY:
                raise self._gone(said)
        try:
            store = c10d.PrefixStore("gloo", self._store)
            gloo = dist.ProcessGroupGloo(store, self.number, len(self.peers), timedelta(seconds=_CONNECT_S))
        except RuntimeError as error:
            raise self.failure or PeerError(
                f"the ranks {listed(self.peers)} could not be connected to pass on batches: {error}. GLOO_SOCKET_IFNAME "
                "names the network to use; with `ranks: {share: read}` each rank reads for itself"
            ) from error
        finally:
            with suppress(RuntimeError):  # the store is gone
                self._store.set(f"connected/{self.number}", "")
        self._await_connected()
        with self._lock:
            self._gloo = gloo
        if self._has_left.is_set() or self.failure is not None:
            self._cut()
            raise self.failure or _closed()

    def _await_all(self, key: str, *, may_leave: bool) -> None:
        """Return once all ranks have written the message `key`. With `may_leave`, `leave` ends the wait."""
        begin_s, poll_s, warn_s = time.monotonic(), _FIRST_POLL_S, self._warn_s
        missing = [*range(len(self.peers))]
        while missing := [n for n in missing if not self._store.check([f"{key}/{n}"])]:
            if self.failure is not None:
                raise self.failure
            # A rank that leaves has written its message first, if it came so far: then all find the same difference,
            # for example.
            if gone := [n for n in missing if self._has_gone_without(key, n)]:
                raise self._gone(self._store.get(f"left/{gone[0]}").decode())
            waited_s, absent = time.monotonic() - begin_s, [self.peers[n] for n in missing]
            if waited_s > self._begin_s:
                raise PeerError(
                    f"rank {listed(absent)} did not begin to iterate within {self._begin_s:g} s, and needs the same batches "
                    f"as rank {self.peers[self.number]} (ranks.share: broadcast): have all ranks of a group iterate",
                    ranks=tuple(absent),
                )
            if waited_s > warn_s:
                warn_s += self._warn_s
                logger.warning("no batch for %.0f s: rank %s has not begun to iterate", waited_s, listed(absent))
            if may_leave and self._has_left.is_set():
                raise _closed()
            self._has_left.wait(poll_s) if may_leave else time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)

    def _await_connected(self) -> None:
        """Return once no rank is connecting any more, or one has failed. One that closed its connections before would leave
        others in gloo: it connects with one peer after another, gives up at a broken connection, and is then awaited by all
        that follow."""
        until_s, poll_s = time.monotonic() + _CONNECT_S, _FIRST_POLL_S
        with suppress(RuntimeError):  # the store is gone
            missing = [f"connected/{n}" for n in range(len(self.peers))]
            while missing := [key for key in missing if not self._store.check([key])]:
                if self.failure is not None or time.monotonic() > until_s:
                    return
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)

    def _has_gone_without(self, key: str, peer: int) -> bool:
        """True if a rank has left without having written the message `key`. The two checks must be made in this order."""
        return self._store.check([f"left/{peer}"]) and not self._store.check([f"{key}/{peer}"])

    def _check_same(self, said: Sequence[str]) -> None:
        own = said[0].split("\n")
        for rank, one in zip(self.peers, said, strict=True):
            for mine, other in zip_longest(own, one.split("\n"), fillvalue="\t"):
                if mine != other:
                    (key, _, value), (own_key, _, own_value) = other.partition("\t"), mine.partition("\t")
                    raise ConfigError(
                        f"rank {rank} and rank {self.reader} are to get the same batches, and their pipelines differ: "
                        f"{key or own_key} is {value or 'not there'} on rank {rank}, and {own_value or 'not there'} on rank "
                        f"{self.reader}"
                    )

    # --------------------------------------------------------------------------------------------------- transfers

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send tensors (uint8, contiguous, CPU) to the children; returns when they are free again. Raises PeerError."""
        works = []
        for child in self.children:
            try:
                works += [(child, self._connected().send([part], child, tag)) for tag, part in enumerate(parts)]
            except RuntimeError as error:
                raise self._explained(child, error) from error
        for child, work in works:
            self._wait(child, work)

    def receive(self, parts: Sequence[torch.Tensor], first_tag: int = 0) -> None:
        """Fill tensors with the tensors that the parent sends, from number `first_tag` on. Raises PeerError."""
        try:
            works = [self._connected().recv([part], self.parent, tag) for tag, part in enumerate(parts, first_tag)]
        except RuntimeError as error:
            raise self._explained(self.parent, error) from error
        for work in works:
            self._wait(self.parent, work)

    def _connected(self) -> Any:
        with self._lock:
            gloo = self._gloo
        if gloo is None:
            raise self.failure or _closed()
        return gloo

    def _wait(self, peer: int, work: Any) -> None:
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise self._explained(peer, error) from error

    # ---------------------------------------------------------------------------------------------------- failures

    def fail(self, reason: str) -> PeerError:
        """End the connections of all ranks because of a fault of this one; returns the error."""
        try:
            return self._failed(self._note(self.number, reason))
        except RuntimeError:  # the store is gone
            return self._failed(self._blame(self.number, reason))

    def leave(self, error: BaseException | None = None) -> None:
        """End all waits, close the connections, and write the reason to the store: `error`, if there was one."""
        if isinstance(error, PeerError) and str(error) in self._reasons:
            self._farewell = self._reasons[str(error)]
        elif error is not None:
            text = f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
            self._farewell = (self.number, f"has left the loop after an error ({text})")
        self._has_left.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_FAREWELL_S)  # it writes the message, and the store may not answer any more
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            gloo, self._gloo = self._gloo, None
        if gloo is not None:
            # Gloo has no call for this: when a wait of a group times out, all of its connections close, and all waits end. A
            # wait for a connection that is broken already does not time out, so each is tried.
            for peer in range(len(self.peers)):
                with suppress(RuntimeError, ValueError):  # this rank itself is none to wait for
                    gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _CUT_TAG).wait(timedelta(milliseconds=1))

    def _watch(self) -> None:
        """Leave signs of life, and look for a failure that others have noticed."""
        period_s = min(_BEAT_S, self._silence_s / 8)
        heard: dict[int, tuple[bytes, float]] = {}
        number = 0
        while not self._has_left.wait(period_s):
            number += 1
            try:
                self._store.set(f"beat/{self.number}", str(number))
                failure = self._noted() or self._silent(heard)
            except RuntimeError:
                continue  # the store is gone; broken connections show which rank is
            if failure is not None:
                self._failed(failure)
                return
        with suppress(RuntimeError):
            farewell = "{}\n{}".format(*self._farewell)
            self._store.compare_set(f"ready/{self.number}", "", farewell)  # the thread may be about to say the contrary
            self._store.set(f"left/{self.number}", farewell)

    def _silent(self, heard: dict[int, tuple[bytes, float]]) -> PeerError | None:
        """The failure of a neighbour that has given no sign of life for too long; `heard` are the last ones."""
        now_s = time.monotonic()
        for peer in (*self.children, *((self.parent,) if self.number else ())):
            if not self._store.check([f"beat/{peer}"]) or self._store.check([f"left/{peer}"]):
                continue
            beat = self._store.get(f"beat/{peer}")
            before = heard.get(peer)
            if before is None or before[0] != beat:
                heard[peer] = (beat, now_s)
            elif now_s - before[1] > self._silence_s:
                return self._note(peer, f"has given no sign of life for {self._silence_s:g} s")
        return None

    def _explained(self, peer: int, error: RuntimeError) -> Exception:
        """The error for a transfer with `peer` that failed, with the reason in words."""
        if isinstance(error, (PeerError, ClosedError)):
            return error
        if self._has_left.is_set():
            return _closed()
        try:
            if (noted := self.failure or self._noted()) is not None:
                return self._failed(noted)
            if self._store.check([f"left/{peer}"]):
                return self._gone(self._store.get(f"left/{peer}").decode())
            return self._failed(self._note(peer, "has died, or its process has ended: its connection broke"))
        except RuntimeError:
            return self._blame(
                peer,
                "cannot be reached any more, nor can the store of torch.distributed, which rank 0 has without torchrun",
            )

    def _gone(self, farewell: str) -> PeerError:
        """The error for a rank that has left, by its message. It is not written to the store: others may still be about to
        receive their last batches, and end."""
        number, _, reason = farewell.partition("\n")
        return self._blame(int(number), reason)

    def _failed(self, failure: PeerError) -> PeerError:
        """Close the connections, so that the others notice, and find the failure in the store."""
        self.failure = failure
        self._cut()
        return failure

    def _noted(self) -> PeerError | None:
        """The failure that a rank has written down first."""
        if not self._store.check(["failed"]):
            return None
        number, _, reason = self._store.get("failed").decode().partition("\n")
        return self._blame(int(number), reason)

    def _note(self, peer: int, reason: str) -> PeerError:
        """Write a failure to the store, unless there is one already; returns the one that is there."""
        self._store.compare_set("failed", "", f"{peer}\n{reason}")
        return self._noted() or self._blame(peer, reason)

    def _blame(self, peer: int, reason: str) -> PeerError:
        rank, what, own = self.peers[peer], "reads" if peer == 0 else "gets", self.peers[self.number]
        needed = "" if peer == self.number else f"it {what} the batches that rank {own} needs, "
        text = f"rank {rank} {reason} ({needed}ranks.share: broadcast among {listed(self.peers)})"
        self._reasons[text] = (peer, reason)
        return PeerError(text, ranks=(rank,))


def _closed() -> ClosedError:
    return ClosedError("the loader was closed while a batch was awaited")
