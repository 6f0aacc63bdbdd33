"""A board of short messages that the ranks of a job share, over a connection of its own to torch.distributed's store.

No collective is called: what training does in its process groups meanwhile is not disturbed, from any thread. Nothing
blocks inside the store either, whose calls of one process exclude one another.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.errors import ConfigError, PeerError
from loaderkit.ranks.store import default_store, listed, own_connection

if dist.is_available():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed import distributed_c10d as c10d

_FIRST_POLL_S = 0.0005
_MAX_POLL_S = 0.02
_BEAT_S = 5.0  # between two signs of life
_FAILED, _LEFT = "failed", "left"


class Board:
    """The messages in `store`, which all ranks share. This rank has number `rank` among them; `global_ranks` are their
    ranks in torch.distributed. `server` is kept as long as the board, because rank 0's store may be the one that serves
    all others. `address` is where other processes of this rank find the board, if they can."""

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        *,
        timeout_s: float,
        server: Any = None,
        address: BoardAddress | None = None,
    ) -> None:
        self.rank = rank
        self.address = address
        self._server = server
        self.global_ranks = tuple(global_ranks)
        self._store = store
        self.timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.global_ranks)

    def post(self, key: str, data: bytes = b"") -> None:
        """Put a message on the board."""
        self._store.set(key, data)

    def has(self, *keys: str) -> bool:
        """True if all these messages are there; one request to the store."""
        return bool(self._store.check(list(keys)))

    def read(self, key: str) -> bytes:
        """A message that is there."""
        data: bytes = self._store.get(key)
        return data

    def remove(self, keys: Sequence[str]) -> None:
        """Remove messages; those that are not there are no error."""
        for key in keys:
            with suppress(RuntimeError):
                self._store.delete_key(key)

    def count(self, key: str) -> None:
        """Add one to a counter, which all ranks share."""
        self._store.add(key, 1)

    def wait_for_count(self, key: str, number: int, *, about: str, timeout_s: float) -> bool:
        """Return once `count` was called so often for `key`, True, or after `timeout_s`, or if a rank failed, False."""
        deadline_s, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        with suppress(RuntimeError):  # the store is gone, and so are the ranks that would count
            while self._store.add(key, 0) < number:
                if time.monotonic() > deadline_s or self.has(f"{about}/{_FAILED}"):
                    return False
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
            return True
        return False

    @contextmanager
    def alive(self, key: str) -> Iterator[None]:
        """While the block runs, ranks that wait for this rank's messages `key` keep waiting, however long that takes."""
        done = threading.Event()

        def beat() -> None:
            number = 0
            while not done.wait(min(_BEAT_S, self.timeout_s / 4)):
                with suppress(RuntimeError):
                    self.post(f"{key}/alive/{self.rank}", str(number := number + 1).encode())

        thread = threading.Thread(target=beat, name=f"loaderkit-alive-{self.rank}", daemon=True)
        with suppress(ProgramEndsError):  # the others then wait `timeout_s` for each message, and no longer
            start_thread(thread)
        try:
            yield
        finally:
            done.set()
            if thread.ident is not None:
                thread.join()

    def fail(self, key: str, error: BaseException) -> None:
        """Tell the ranks that wait for messages about `key` that this rank failed."""
        with suppress(RuntimeError):
            self._store.compare_set(f"{key}/{_FAILED}", "", f"{self.rank}\n{_reason(error)}")

    def leave(self, what: str, error: BaseException) -> None:
        """Tell all ranks that this one has left `what`, and posts nothing any more: ranks that wait for it, now or
        later, stop waiting."""
        with suppress(RuntimeError):
            self.post(f"{_LEFT}/{self.rank}", f"has left {what} by {_reason(error)}".encode(errors="replace"))
            self.post(_LEFT)

    def collect(self, key: str, *, about: str = "", doing: str, timeout_s: float | None = None) -> list[bytes]:
        """The messages `{key}/{rank}` of all ranks; waits for them, at most `timeout_s` instead of the board's.

        Failures and signs of life are looked up below `about`, by default `key`. Raises PeerError that names the ranks
        that failed or left, or that sent nothing within the timeout and gave no sign of life; `doing` says what the
        messages are for.
        """
        return self._wait({rank: f"{key}/{rank}" for rank in range(len(self))}, about or key, doing, timeout_s)

    def wait_for(self, key: str, source: int, *, about: str, doing: str) -> bytes:
        """The message `key`, which rank `source` posts; otherwise as `collect`."""
        return self._wait({source: key}, about, doing)[0]

    def _wait(self, keys: dict[int, str], about: str, doing: str, timeout_s: float | None = None) -> list[bytes]:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        missing, messages = dict(keys), {}
        beats: dict[int, bytes] = {}
        heard_s, looked_s, poll_s = time.monotonic(), time.monotonic(), _FIRST_POLL_S
        try:
            while True:
                # They usually come in order; those behind the first that is missing are not asked for yet.
                while missing and self.has(missing[rank := next(iter(missing))]):
                    messages[rank] = self.read(missing.pop(rank))
                    heard_s = time.monotonic()
                if not missing:
                    return [messages[rank] for rank in keys]
                if self.has(f"{about}/{_FAILED}"):
                    number, _, reason = self.read(f"{about}/{_FAILED}").decode().partition("\n")
                    raise self._blame([int(number)], f"failed: {reason}", doing)
                self._check_left(missing, doing)
                if time.monotonic() - looked_s > min(_BEAT_S, timeout_s / 8):
                    looked_s = time.monotonic()
                    if self._beats(about, rank := next(iter(missing)), beats):
                        heard_s = looked_s
                if time.monotonic() - heard_s > timeout_s:
                    raise self._blame([*missing], f"did not come within {timeout_s:g} s", doing)
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(
                f"the store of torch.distributed is gone while {doing}: unless torchrun keeps it, that is rank 0's, which has "
                f"probably died ({str(error)[:200]})",
                ranks=(0,),
            ) from error

    def _check_left(self, missing: Mapping[int, str], doing: str) -> None:
        """Raise PeerError if a rank has left without its message."""
        if not self.has(_LEFT):
            return
        for rank, key in missing.items():
            # In this order: a rank posts what it has to say before it leaves.
            if self.has(left := f"{_LEFT}/{rank}") and not self.has(key):
                raise self._blame([rank], self.read(left).decode(), doing)

    def _beats(self, about: str, rank: int, beats: dict[int, bytes]) -> bool:
        """True if a rank has given a sign of life since the last look."""
        key = f"{about}/alive/{rank}"
        if not self.has(key):
            return False
        before, beats[rank] = beats.get(rank), self.read(key)
        return before != beats[rank]

    def _blame(self, numbers: Sequence[int], reason: str, doing: str) -> PeerError:
        ranks = tuple(self.global_ranks[number] for number in numbers)
        return PeerError(f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {reason} (while {doing})", ranks=ranks)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class BoardAddress(NamedTuple):
    """Where a board is, for another process of the same rank."""

    host: str
    port: int
    prefix: str
    rank: int
    global_ranks: tuple[int, ...]
    timeout_s: float

    def open(self, server: Any = None) -> Board:
        """A connection of its own. Raises PeerError without an answer."""
        timeout = timedelta(seconds=self.timeout_s)
        try:
            store = TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise PeerError(
                f"the store of torch.distributed at {self.host}:{self.port} does not answer: {error}", ranks=(0,)
            ) from error
        own = c10d.PrefixStore(self.prefix, store)
        return Board(own, self.rank, self.global_ranks, timeout_s=self.timeout_s, server=server, address=self)


def board_with_address(board: Board) -> Board:
    """Another board of the same ranks, which has an address. Every rank calls it.

    Raises ConfigError if the store of torch.distributed is of a kind that cannot be connected to, and PeerError.
    """
    server = kept = default_store()
    while isinstance(server, c10d.PrefixStore):
        server = server.underlying_store
    if not isinstance(server, TCPStore):
        raise ConfigError(
            f"flush: process connects to the store of torch.distributed, and a {type(server).__name__} has no address: "
            "initialise torch.distributed by env:// or tcp://, or use flush: thread"
        )
    # Torch does not say what prefixes its own store has, so this one has a name that no other job has.
    if board.rank == 0:
        board.post("address", uuid.uuid4().hex.encode())
    name = board.wait_for("address", 0, about="address", doing="the ranks agree on a name")
    prefix = f"loaderkit/{name.decode()}"
    address = BoardAddress(server.host, server.port, prefix, board.rank, board.global_ranks, board.timeout_s)
    return address.open(kept)


def open_board(name: str, process_group: Any = None, *, timeout_s: float) -> Board:
    """The board `name`, which every rank of the group names alike. Raises ConfigError without torch.distributed."""
    store = default_store()
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    own = own_connection(store, f"loaderkit/{name}")
    return Board(own, dist.get_rank(process_group), ranks, timeout_s=timeout_s, server=store)
