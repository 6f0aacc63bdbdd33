"""Ranks that pass bytes on to one another: connections of their own, and who is to blame when they break.

Everything goes over gloo, in the order that all ranks have computed, by one thread of each. When one fails it says so in the
store and hangs up; the others notice at once, because what they wait for cannot come any more, read who it was, and hang up as
well. One that died says nothing: it is the one that does not answer when the others call the roll.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from loaderkit.errors import CheckpointError, ConfigError, PeerError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def machine() -> str:
    """What tells machines apart; containers on one machine share its memory, whatever they are called."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


_LOOK_S = 0.5  # between looks at whether the roll is called
_PATIENCE_S = 5.0  # for the others to answer
_FAREWELL_S = 2.0


class Group:
    """`names` are the ranks' numbers as the user knows them, `me` is the place of this one among them."""

    def __init__(self, store: Any, load_id: str, names: Sequence[int], me: int, *, timeout_s: float) -> None:
        """Connect all with all. Raises PeerError naming those that did not come."""
        self.names = tuple(names)
        self.me = me
        self.doing = "connecting"
        self._timeout_s = timeout_s
        self._store = c10d.PrefixStore(f"loaderkit/{load_id}", store)
        self._gloo: Any = None
        try:
            self._store.set(f"joined/{me}", "")
            connections = c10d.PrefixStore("gloo", self._store)
            self._gloo = dist.ProcessGroupGloo(connections, me, len(names), timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._not_come(error) from error

    def __len__(self) -> int:
        return len(self.names)

    def _not_come(self, error: RuntimeError) -> PeerError:
        with suppress(RuntimeError):
            missing = [n for n in range(len(self)) if not self._store.check([f"joined/{n}"])]
            if missing:
                return self._blame(missing, f"did not come to share the checkpoint within {self._timeout_s:g} s")
        return PeerError(f"the ranks could not be connected to share the checkpoint: {error}")

    # ------------------------------------------------------------------------------------------------- passing bytes

    def pass_on(self, number: int, data: torch.Tensor, owner: int, takers: Sequence[int]) -> None:
        """Bring `data` (uint8, contiguous, CPU) from `owner` to the other takers. Those, and only those, call it; `number`
        is the same for all. Raises PeerError."""
        try:
            if len(takers) == len(self):
                self._broadcast(data, owner)
            elif self.me == owner:
                sent = [self._gloo.send([data], taker, number) for taker in takers if taker != owner]
                for work in sent:
                    work.wait()
            else:
                self._gloo.recv([data], owner, number).wait()
        except RuntimeError as error:
            raise self._explained(error, owner) from error

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, by place. Raises PeerError."""
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.names]
            self._gloo.allgather([sizes], [torch.tensor([len(data)])]).wait()
            found = []
            for rank, size in enumerate(sizes):
                part = torch.empty(int(size), dtype=torch.uint8)
                if rank == self.me and data:
                    part = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if len(part):
                    self._broadcast(part, rank)
                found.append(part.numpy().tobytes())
            return found
        except RuntimeError as error:
            raise self._explained(error, None) from error

    def num_alike(self, tag: str) -> int:
        """How many ranks, this one with them, gave the same tag. Raises PeerError."""
        mine = torch.tensor([int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7])])
        found = [torch.zeros_like(mine) for _ in self.names]
        try:
            self._gloo.allgather([found], [mine]).wait()
        except RuntimeError as error:
            raise self._explained(error, None) from error
        return sum(int(item) == int(mine) for item in found)

    def _broadcast(self, data: torch.Tensor, owner: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        self._gloo.broadcast([data], options).wait()

    # ------------------------------------------------------------------------------------------------------ failures

    def fail(self, error: BaseException) -> None:
        """This rank gives up because of an error of its own: tell the others, and hang up."""
        if not isinstance(error, PeerError):
            with suppress(RuntimeError):
                said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self._store.compare_set("first", "", f"{self.me}\nfailed: {said}")
        self._gloo = None

    def finish(self) -> None:
        """Everything has arrived here; returns when it has everywhere. Raises PeerError."""
        self.doing = "done"
        self.exchange(b"")
        # Who hangs up first must not disturb those that are still reading the last message.
        deadline_s = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):
            self._store.add("done", 1)
            while self._store.add("done", 0) < len(self) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        self._gloo = None

    def attend(self, done: threading.Event, tick: Callable[[], None]) -> PeerError | None:
        """Answer when the roll is called, until `done`, or until some rank has failed and this one has not noticed: that
        failure. For the thread that waits for the one that passes bytes on."""
        while not done.wait(_LOOK_S):
            tick()
            with suppress(RuntimeError):
                if self._store.check(["alarm"]):
                    self._answer()
                if (failed := self._first()) is not None and not done.wait(_PATIENCE_S):
                    return failed
        return None

    def _answer(self) -> None:
        self._store.set(f"here/{self.me}", self.doing)

    def _explained(self, error: RuntimeError, owner: int | None) -> PeerError:
        """Why a connection broke, or why nothing came: whose fault it is."""
        self._gloo = None  # hang up: those that wait for this rank notice
        try:
            return self._first() or self._called_roll(error, owner)
        except RuntimeError:
            return PeerError(
                f"another rank is gone, and so is the store of torch.distributed: unless torchrun keeps it, that is rank 0's, "
                f"which has probably died ({_short(error)})",
                ranks=(0,),
            )

    def _first(self) -> PeerError | None:
        """What the first failure was, if it has been said."""
        if not self._store.check(["first"]):
            return None
        rank, _, said = self._store.get("first").decode().partition("\n")
        if not rank:
            return None
        return self._blame([int(rank)], said)

    def _called_roll(self, error: RuntimeError, owner: int | None) -> PeerError:
        self._store.set("alarm", "1")
        self._answer()
        deadline_s = time.monotonic() + min(_PATIENCE_S, self._timeout_s)
        absent = [*range(len(self))]
        while absent and time.monotonic() < deadline_s:
            time.sleep(0.02)
            if (found := self._first()) is not None:
                return found
            absent = [n for n in absent if not self._store.check([f"here/{n}"])]
        if absent:
            who, said = absent, "does not answer any more: it has probably died"
        elif owner is not None and owner != self.me:
            doing = self._store.get(f"here/{owner}").decode()
            who = [owner]
            said = f"did not pass on what it reads within {self._timeout_s:g} s; it is {doing} ({_short(error)})"
        else:
            who, said = [], ""
        if len(who) == 1:  # all are to say the same
            self._store.compare_set("first", "", f"{who[0]}\n{said}")
            return self._first() or self._blame(who, said)
        if who:
            return self._blame(who, said.replace("does", "do").replace("it has", "they have"))
        return PeerError(f"a connection between ranks broke, and all of them still answer: {_short(error)}")

    def _blame(self, who: Sequence[int], said: str) -> PeerError:
        ranks = tuple(self.names[n] for n in who)
        listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return PeerError(
            f"rank{'s' if len(ranks) > 1 else ''} {listed} {said}. What this rank was to be given by others did not come",
            ranks=ranks,
        )


def _short(error: BaseException) -> str:
    """The first sentence of what gloo says, without its place in the source."""
    return str(error).rpartition("] ")[2].partition(". ")[0][:200] or type(error).__name__


def default_store() -> Any:
    """The store that torch.distributed's processes found one another by. Raises ConfigError without one."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "ranks are given, and torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first"
        )
    return c10d._get_default_store()  # there is no public name for it; torch's own packages use this one


def check_same(group: Group, what: str, said: Sequence[Any]) -> None:
    """Raise CheckpointError unless all ranks said the same of something."""
    strange = [group.names[n] for n, item in enumerate(said) if item != said[0]]
    if strange:
        raise CheckpointError(
            f"the ranks do not agree on {what}: rank {strange[0]} differs from rank {group.names[0]}; nothing was written. All "
            "must call it alike, of the same checkpoint"
        )
