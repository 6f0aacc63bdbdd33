"""Ranks that give pieces to one another: the bytes, strangers, and failures that are told."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from loaderkit.checkpoint.save.tensor_bytes import TensorBytes
from loaderkit.errors import CheckpointError, PeerError
from loaderkit.ranks.pieces import PieceClient, PieceServer, RemoteElements


@pytest.fixture
def server() -> Iterator[PieceServer]:
    server = PieceServer()
    yield server
    server.close()


def test_any_range_for_any_thread(server: PieceServer, rng: random.Random) -> None:
    tensors = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (1, 5000, 300_000)]
    client = PieceClient(1, {0: server.address})
    client.connect()
    server.serve([TensorBytes(tensor) for tensor in tensors])
    wrong: list[int] = []

    def ask(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(30):
            number = own.randrange(3)
            lo, hi = sorted(own.randrange(len(tensors[number]) + 1) for _ in range(2))
            target = np.empty(hi - lo, np.uint8)
            RemoteElements(client, 0, number, len(tensors[number])).copy(lo, target)
            if not np.array_equal(target, tensors[number][lo:hi].numpy()):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(rng.random(),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client.finish()
    server.wait([1])
    client.close()


def test_a_stranger_gets_nothing(server: PieceServer) -> None:
    server.serve([TensorBytes(torch.arange(9))])
    with pytest.raises(PeerError, match="rank 0 has failed, or cannot be reached"):
        PieceClient(1, {0: server.address._replace(token=bytes(32))}).connect()


def test_the_one_that_takes_fails(server: PieceServer) -> None:
    client = PieceClient(3, {0: server.address})
    client.connect()
    server.serve([])
    client.close("OSError: the disk is full")
    with pytest.raises(PeerError, match="rank 3 failed: OSError: the disk is full") as caught:
        server.wait([3])
    assert caught.value.ranks == (3,)
    assert not isinstance(caught.value, CheckpointError)  # a loop over batches raises this, too


def test_the_one_that_takes_fails_before_it_comes(server: PieceServer) -> None:
    PieceClient(3, {0: server.address}).close("ConfigError: a name")
    server.serve([])
    with pytest.raises(PeerError, match="rank 3 failed: ConfigError: a name"):
        server.wait([3])


def test_the_one_that_gives_fails(server: PieceServer) -> None:
    client = PieceClient(1, {7: server.address})
    client.connect()
    server.serve([TensorBytes(torch.arange(9))])
    client.read(7, 0, 0, np.empty(8, np.uint8))
    server.close("ValueError: a tensor")
    with pytest.raises(
        PeerError, match=r"rank 7 failed: ValueError: a tensor|rank 7 failed, or died|rank 7 has failed"
    ):
        client.read(7, 0, 0, np.empty(8, np.uint8))
    client.close()


def test_one_that_never_comes(server: PieceServer) -> None:
    server.serve([])
    with pytest.raises(PeerError, match=r"rank 4 did not come for its parts of a checkpoint within 0\.01 s"):
        server.wait([4], timeout_s=0.01)


def test_a_tensor_that_cannot_be_read(server: PieceServer) -> None:
    class Broken:
        num_bytes = 8

        def copy(self, start: int, target: object) -> None:
            raise RuntimeError("out of memory")

    client = PieceClient(1, {0: server.address})
    client.connect()
    server.serve([Broken()])
    with pytest.raises(PeerError, match="rank 0 failed, or died, before it gave all parts"):
        client.read(0, 0, 0, np.empty(8, np.uint8))
    client.close()
