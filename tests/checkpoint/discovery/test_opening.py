"""How a checkpoint is opened: few requests, and those that do not need one another's answers at once."""

from __future__ import annotations

import json
import threading

import pytest
import safetensors.torch
import torch

import loaderkit
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector

_NUM_SHARDS = 12


class Together(MemoryConnector):
    """A store that answers late: no shard's first read is answered until those of all shards have been asked for."""

    traits = ConnectorTraits(coalesce_gap=2**20)

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []
        self.all_asked = threading.Barrier(_NUM_SHARDS, timeout=120)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, start + len(buffer)))
        if start == 0 and key.endswith(".safetensors"):
            self.all_asked.wait()
        super().read_into(key, start, buffer, etag=etag)


def shards(num_tensors: int, size: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    names: dict[str, str] = {}
    for n in range(_NUM_SHARDS):
        tensors = {f"layer.{n}.{k}": torch.full((size,), n) for k in range(num_tensors)}
        files[f"m-{n}.safetensors"] = safetensors.torch.save(tensors)
        names |= dict.fromkeys(tensors, f"m-{n}.safetensors")
    return files | {"m.safetensors.index.json": json.dumps({"weight_map": names}).encode()}


@pytest.mark.parametrize(("num_tensors", "num_reads"), [(1, 1), (1500, 2)])  # with headers of less and more than 64 KiB
def test_shards_are_looked_at_all_at_once(num_tensors: int, num_reads: int) -> None:
    store = Together(shards(num_tensors, 10_000 // num_tensors))
    given = {"memory": store}
    restored = loaderkit.restore("memory://", keys="layer.3.0", connectors=given)
    assert restored["layer.3.0"].tolist() == [3] * (10_000 // num_tensors)
    assert len(store.reads) == num_reads * _NUM_SHARDS + 2  # and the index, and the tensor


def test_latest_compares_descriptions_all_at_once() -> None:
    plain = MemoryConnector({f"step-1/{name}": data for name, data in shards(1, 10).items()})
    loaderkit.checkpoint.write_manifest("memory://step-1", connectors={"memory": plain})
    objects = {}
    for info in plain.list(""):
        data = bytearray(info.size)
        plain.read_into(info.key, 0, memoryview(data))
        objects[info.key] = bytes(data)
    store = Together(objects)
    assert loaderkit.checkpoint.latest("memory://", connectors={"memory": store}) == "memory://step-1"
    assert len(store.reads) == 2 * (_NUM_SHARDS + 1) + 1  # shards and index, the same once more, and the manifest
