"""`dcp.load` through `StreamReader`: equal to its own reader, resharded, and nothing executed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import random_tensor, same, save_dcp, saved
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import StreamReader
from loaderkit.checkpoint.formats.shard_archive import ArchivedTensor, Layouts
from loaderkit.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(fill: bool) -> dict[str, Any]:
    def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
        return random_tensor(torch.float32, shape, seed) if fill else torch.zeros(shape)

    return {
        "model": {"w": tensor(300, 400), "b": tensor(7, seed=1), "empty": tensor(0, 4)},
        "optimizer": {"state": {"0": {"step": torch.tensor(9.0 if fill else 0.0)}}, "lr": 0.5 if fill else 0.0},
        "names": ["a", {"b": 1 if fill else 0}],
    }


def test_equals_its_own_reader(tmp_path: Path) -> None:
    save_dcp(state_of(True), tmp_path / "s")
    loaded, wanted = state_of(False), state_of(False)
    load(wanted, storage_reader=FileSystemReader(tmp_path / "s"), no_dist=True)
    reader = StreamReader(tmp_path / "s")
    for _ in range(2):  # it can be used again
        load(loaded, storage_reader=reader, no_dist=True)
        assert loaded["optimizer"]["lr"] == 0.5
        assert loaded["names"] == wanted["names"]
        for name in ("w", "b", "empty"):
            assert same(loaded["model"][name], wanted["model"][name])
    assert same(loaded["optimizer"]["state"]["0"]["step"], torch.tensor(9.0))
    assert reader.stats is not None
    assert reader.stats["num_samples"] > 0


def test_metadata_is_that_of_torch(tmp_path: Path) -> None:
    save_dcp(state_of(True), tmp_path / "s")
    ours, theirs = StreamReader(tmp_path / "s").read_metadata(), FileSystemReader(tmp_path / "s").read_metadata()
    assert isinstance(ours, Metadata)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data


def test_other_formats_too(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3, 2)}, tmp_path / "m.safetensors")
    state = {"w": torch.zeros(3, 2)}
    load(state, storage_reader=StreamReader(tmp_path), no_dist=True)
    assert state["w"].eq(1).all()


def test_a_value_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/mark",)

    save_dcp({"k": Evil()}, tmp_path / "s")
    with pytest.raises(CheckpointException, match=r"CheckpointError.*'k' holds an object of posix\.system"):
        load({"k": 1}, storage_reader=StreamReader(tmp_path / "s"), no_dist=True)
    assert not (tmp_path / "mark").exists()


def test_a_bad_value_is_refused_before_a_tensor_is_written(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.getenv, ("HOME",)

    save_dcp({"k": Evil(), "w": torch.ones(5)}, tmp_path / "s")
    state = {"k": 1, "w": torch.zeros(5)}
    with pytest.raises(CheckpointException, match="'k' holds an object of") as caught:
        load(state, storage_reader=StreamReader(tmp_path / "s"), no_dist=True)
    error: Any = caught.value.failures[0][0]
    assert error.touched == ()
    assert not state["w"].any()  # type: ignore[attr-defined]


def test_damage_is_found(tmp_path: Path) -> None:
    save_dcp(state_of(True), tmp_path / "s")
    loaderkit.checkpoint.write_manifest(tmp_path / "s")
    file = tmp_path / "s/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"CheckpointError.*model\.w.* is damaged"):
        load(state_of(False), storage_reader=StreamReader(tmp_path / "s"), no_dist=True)


def test_archives_that_are_alike_are_read_once_and_others_are_not_mistaken_for_them() -> None:
    def layout(read: Callable[[memoryview], ArchivedTensor], data: bytes) -> ArchivedTensor | str:
        try:
            return read(memoryview(bytearray(data)))
        except FormatError as error:
            return str(error)

    def anew(data: memoryview) -> ArchivedTensor:
        return Layouts().read(data)

    first, other = saved(torch.arange(5.0)), saved(torch.arange(5.0) + 1)
    known = Layouts()
    assert known.read(memoryview(bytearray(first))) is known.read(memoryview(bytearray(other)))
    for data in (
        saved(torch.arange(5)),
        saved(torch.arange(10.0)[::2].clone()),
        saved(torch.arange(6.0).reshape(2, 3)),
    ):
        assert layout(known.read, data) == layout(anew, data)
    for place in range(len(first)):
        layout(known.read, first)
        changed = first[:place] + bytes([other[place] ^ 0x41]) + first[place + 1 :]
        assert layout(known.read, changed) == layout(anew, changed), place
