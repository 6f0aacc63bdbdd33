"""What ranks that share batches say to one another before the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from loaderkit.errors import ConfigError
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
