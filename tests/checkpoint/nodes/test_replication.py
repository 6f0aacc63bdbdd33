"""Two nodes copy one another's steps, in rounds, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from node_pairs import Pair, write_step

from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.nodes.folder import NodeFolder
from loaderkit.checkpoint.nodes.replication import Replication
from loaderkit.ranks.board import Board

SIZE = 9 * 2**20 + 17  # two parts


class Gated(NodeFolder):
    """Files of tensors are read once `gate` is set; `begun` is set when one waits."""

    gate = threading.Event()
    begun = threading.Event()

    def read(self, key: str, start: int, buffer: memoryview, etag: str | None = None) -> None:
        if key.endswith(".distcp"):
            self.begun.set()
            assert self.gate.wait(120)
        super().read(key, start, buffer, etag)


class Replicating:
    def __init__(self, folder: Path) -> None:
        self.pair = Pair(folder, Gated)
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.rounds: list[set[str]] = []
        self.nodes = [
            Replication(
                self.pair.folders[here],
                self.pair.stores[here].clients[1 - here],
                Board(store, here, (0, 1), timeout_s=120.0),
                (0, 1),
                last="step-0000000000",
                replicated=lambda: self.rounds.append(self.nodes[0].stays()),
            )
            for here in range(2)
        ]

    def add(self, number: int) -> str:
        name = write_step(self.pair.paths, number, SIZE)
        for node in self.nodes:
            node.add(name)
        return name

    def finish(self) -> None:
        for node in self.nodes:
            node.finish()

    def replicas(self) -> list[list[str]]:
        return [sorted(path.name for path in one.glob("replicas/*")) for one in self.pair.paths]


@pytest.fixture
def replicating(tmp_path: Path) -> Iterator[Replicating]:
    Gated.gate.set()
    Gated.begun.clear()
    both = Replicating(tmp_path)
    yield both
    Gated.gate.set()
    for node in both.nodes:
        node.close()
    both.pair.close()


def test_replicas_are_the_other_node_s_files(replicating: Replicating) -> None:
    name = replicating.add(1)
    replicating.finish()
    for here, path in enumerate(replicating.pair.paths):
        other = replicating.pair.paths[1 - here] / name
        copied = {file.name: file.read_bytes() for file in (path / "replicas" / name).iterdir()}
        assert copied == {file.name: file.read_bytes() for file in other.iterdir()}
        stats = replicating.nodes[here].stats()
        assert (stats["num_replicated"], stats["num_failed_replicas"]) == (1, 0)
        assert stats["replicated_bytes"] == sum(map(len, copied.values()))
    assert replicating.nodes[0].stays() == {name, ""}


def test_all_nodes_copy_the_same_steps_and_what_is_superseded_not_at_all(replicating: Replicating) -> None:
    Gated.gate.clear()
    first = replicating.add(1)
    assert Gated.begun.wait(120)
    replicating.add(2)
    last = replicating.add(3)
    assert replicating.nodes[0].stays() == {"step-0000000000", first, last}  # 0 is the last with replicas
    Gated.gate.set()
    replicating.finish()
    assert replicating.replicas() == [[first, last]] * 2
    assert replicating.rounds == [{first, "", last}, {last, ""}]


def test_a_step_of_which_one_replica_fails_does_not_take_the_place_of_the_last(
    replicating: Replicating, caplog: pytest.LogCaptureFixture
) -> None:
    first = replicating.add(1)
    replicating.finish()
    Gated.gate.clear()
    second = replicating.add(2)
    assert Gated.begun.wait(120)
    damaged = replicating.pair.paths[0] / second / "__0_2.distcp"
    with damaged.open("r+b") as file:  # in place, as it may be listed meanwhile
        file.seek(SIZE - 5)
        file.write(bytes([damaged.read_bytes()[SIZE - 5] ^ 1]))
    Gated.gate.set()
    replicating.finish()
    assert f"there is no replica of {second} in {replicating.pair.paths[1]}" in caplog.text
    assert "__0_2.distcp is damaged: bytes from " in caplog.text
    assert replicating.nodes[0].stays() == {first, ""}
    assert not (replicating.pair.paths[1] / "replicas" / second).exists()  # nothing has its name
    third = replicating.add(3)
    replicating.finish()
    assert replicating.replicas() == [[first, second, third], [first, third]]


def test_a_replica_goes_with_its_step(replicating: Replicating) -> None:
    first = replicating.add(1)
    replicating.finish()
    for path in replicating.pair.paths:
        (path / first / NAME).unlink()
    second = replicating.add(2)
    replicating.finish()
    assert replicating.replicas() == [[second]] * 2


def test_waiting_for_no_longer_than_there_is_time(replicating: Replicating) -> None:
    Gated.gate.clear()
    name = replicating.add(1)
    assert Gated.begun.wait(120)
    for node in replicating.nodes:
        node.finish(within_s=0.0)
    assert all(name not in names for names in replicating.replicas())
    Gated.gate.set()
    replicating.finish()
    assert replicating.replicas() == [[name]] * 2


def test_closed_in_the_middle_leaves_nothing_under_its_name(replicating: Replicating) -> None:
    Gated.gate.clear()
    name = replicating.add(1)
    assert Gated.begun.wait(120)
    closing = [threading.Thread(target=node.close) for node in replicating.nodes]
    for thread in closing:
        thread.start()
    for node in replicating.nodes:
        while not node._closed:
            closing[0].join(0.01)
    Gated.gate.set()
    for thread in closing:
        thread.join()
    assert all(name not in names for names in replicating.replicas())
    replicating.nodes[0].add(name)  # does nothing any more
    replicating.finish()
