"""What ranks that share batches say to one another before the first one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from loaderkit.errors import ClosedError, ConfigError, PeerError
from loaderkit.ranks import channel
from loaderkit.ranks.channel import PeerChannel


class MeanwhileStore:
    """A store in which `act` happens between a look that finds no word `key`, and the next look."""

    def __init__(self, name: str, store: Any, key: str, act: Callable[[], None]) -> None:
        self._store = PrefixStore(name, getattr(store, "_store", store))
        self._key, self._act = key, act

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        if keys == [self._key] and not found:
            self._act()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_rank_that_comes_and_goes_between_two_looks_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find that their pipelines differ, also the one that looks late."""
    store: Any = vars(dist)["HashStore"]()
    monkeypatch.setattr(channel, "default_store", lambda: store)
    first, second = (PeerChannel((0, 1), number, "one", timeout_s=60, raises=True) for number in range(2))

    def come_and_go() -> None:
        second.begin()
        with pytest.raises(ConfigError, match="their pipelines differ: the size is '5' on rank 1"):
            second.connect({"the size": "5"})
        second.leave()

    module = "torch.distributed.distributed_c10d.PrefixStore"
    monkeypatch.setattr(module, lambda name, inner: MeanwhileStore(name, inner, "joined/1", come_and_go))
    first.begin()
    try:
        with pytest.raises(ConfigError, match="their pipelines differ: the size is '5' on rank 1"):
            first.connect({"the size": "4"})
    finally:
        first.leave()


class LeavingStore:
    """A store that calls `act` before the call number `turn` of it."""

    def __init__(self, store: Any, turn: int, act: Callable[[], None]) -> None:
        self._store, self._left, self._act = store, turn, act

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._act()
            return getattr(self._store, name)(*arguments)

        return call


@pytest.mark.parametrize("turn", range(1, 20))
def test_a_rank_that_leaves_at_any_moment_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Whether it connects first or goes at once: all ranks find the same, and none waits until gloo gives up."""
    store: Any = vars(dist)["HashStore"]()
    monkeypatch.setattr(channel, "default_store", lambda: store)
    module = "torch.distributed.distributed_c10d.PrefixStore"
    monkeypatch.setattr(
        module, lambda name, inner: PrefixStore(name, inner if isinstance(inner, Store) else inner._store)
    )
    peers = [PeerChannel((0, 1, 2), number, f"leaves {turn}", timeout_s=60, raises=True) for number in range(3)]
    errors: list[Exception | None] = [None] * 3

    def connect(number: int) -> None:
        try:
            peers[number].connect({})
        except (ClosedError, PeerError) as error:
            errors[number] = error
            peers[number].leave(error)

    for peer in peers:
        peer.begin()
    peers[1]._store = LeavingStore(peers[1]._store, turn, peers[1].leave)
    threads = [threading.Thread(target=connect, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for peer in peers:
        peer.leave()
    assert not [error for error in errors if "timeout" in str(error).lower()]
    assert errors[1] is None or isinstance(errors[1], ClosedError)
    if isinstance(errors[1], ClosedError):
        said = {str(errors[number]) for number in (0, 2) if errors[number] is not None}
        assert all("rank 1 has left the loop" in text or "closed by peer" in text for text in said)
