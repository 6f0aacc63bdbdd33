"""The folders of two nodes as one store, over real connections in one process."""

from __future__ import annotations

import pickle
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pairs import Pair

from loaderkit.checkpoint.nodes.server import MAX_READ_BYTES, NodeClient
from loaderkit.connectors.base import writes_of
from loaderkit.errors import (
    ConnectorError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    UnreachableError,
)
from loaderkit.testing import ConnectorContract, Store


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    nodes = Pair(tmp_path)
    yield nodes
    nodes.close()


class TestNodesConnector(ConnectorContract):
    """Each second object is on the other node only."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[Any]:
        made: list[Pair] = []

        def make(objects: dict[str, bytes]) -> Store:
            nodes = Pair(tmp_path / f"{len(made)}")
            made.append(nodes)
            places = {key: nodes.folders[number % 2] for number, key in enumerate(sorted(objects))}
            for key, data in objects.items():
                places[key].put(key, data)
            return Store(nodes.stores[0], replace=lambda key, data: places[key].put(key, data))

        yield make
        for nodes in made:
            nodes.close()


def names_in(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_rank_0_writes_renames_and_deletes_everywhere_and_others_at_home(pair: Pair) -> None:
    first, second = (writes_of(store) for store in pair.stores)
    for number, writes in enumerate((first, second)):
        writer = writes.create(f".saving-x/__{number}_5.distcp", 3)
        writer.write(0, memoryview(b"abc"))
        writer.commit()
    first.put(".saving-x/.metadata", b"m")
    first.sync(".saving-x/")
    assert first.rename(".saving-x/", "step-0000000001/")
    assert [names_in(path) for path in pair.paths] == [
        {f"step-0000000001/__{number}_5.distcp", "step-0000000001/.metadata"} for number in range(2)
    ]
    keys = [f"step-0000000001/{name}" for name in (".metadata", "__0_5.distcp", "__1_5.distcp")]
    assert all([info.key for info in store.list("step-")] == keys for store in pair.stores)
    second.put("mine", b"1")
    assert "mine" not in names_in(pair.paths[0])
    for key in (*keys, "mine"):
        first.delete(key)
    first.clear("step-0000000001/")
    assert [names_in(path) for path in pair.paths] == [set(), set()]
    assert [[*path.iterdir()] for path in pair.paths] == [[], []]


def test_a_copy_in_another_process_sees_the_same(pair: Pair) -> None:
    writes_of(pair.stores[0]).put("a", b"12")
    other = pickle.loads(pickle.dumps(pair.stores[1]))
    assert [(info.key, info.size) for info in other.list("")] == [("a", 2)]
    other.close()


def test_reads_of_more_than_one_call_and_errors_of_the_other_node(pair: Pair) -> None:
    data = bytes(range(256)) * (MAX_READ_BYTES // 256) + b"end"
    (pair.paths[1] / "large").write_bytes(data)
    buffer = memoryview(bytearray(len(data)))
    pair.stores[0].read_into("large", 0, buffer)
    assert bytes(buffer) == data
    (pair.paths[1] / "large").write_bytes(b"short")
    with pytest.raises(ShortReadError, match="node 1 "):
        pair.stores[0].clients[1].read("large", 0, buffer[:100])
    with pytest.raises(ObjectNotFoundError, match="node 1 "):
        pair.stores[0].clients[1].read("../secret", 0, buffer[:1])
    with pytest.raises(ConnectorError, match="KeyError"):
        pair.stores[0].clients[1].call("run", "rm")
    with pytest.raises(ObjectNotFoundError, match="is on none of 2 nodes"):
        pair.stores[0].stat("none")
    info = pair.stores[0].stat("large")
    (pair.paths[1] / "large").write_bytes(b"other")
    pair.stores[0].stat("large")
    with pytest.raises(ObjectChangedError):
        pair.stores[0].read_into("large", 0, buffer[:5], etag=info.etag)


def test_a_node_that_is_gone_is_named_and_another_token_hears_nothing(pair: Pair) -> None:
    address = pair.servers[1].address
    with pytest.raises(UnreachableError, match="node 1 cannot be reached at "):
        NodeClient(1, address._replace(token=bytes(32)), 20.0).call("list", "")
    with socket.create_connection(("127.0.0.1", address.port)) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b""
    list(pair.stores[0].list(""))
    pair.servers[1].close()
    with pytest.raises(UnreachableError, match="node 1 "):
        list(pair.stores[0].list(""))
    with pytest.raises(UnreachableError, match="node 1 "):
        writes_of(pair.stores[0]).put("a", b"1")
    assert names_in(pair.paths[0]) == set()  # the others first


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    nodes = Pair(tmp_path)
    list(nodes.stores[0].list(""))
    threads = [thread for thread in threading.enumerate() if thread.name == "loaderkit-node"]
    nodes.close()
    for thread in threads:
        thread.join(20)
    assert {*threading.enumerate()} <= before  # those of other tests may end meanwhile
    shutil.rmtree(tmp_path)
