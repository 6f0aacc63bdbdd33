"""Checksums compared while a checkpoint is read: any block, any step, and once more before anybody is told."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from checkpoint_states import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

import loaderkit
from loaderkit.checkpoint import write_manifest
from loaderkit.checkpoint.transfer import stages
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError


class Flipping(MemoryConnector):
    """Gives a wrong bit at one place of the shard, `times` times."""

    def __init__(self, folder: Path, coalesce_gap: int, place: int, times: int) -> None:
        super().__init__({path.name: path.read_bytes() for path in folder.iterdir()})
        self.traits = ConnectorTraits(coalesce_gap=coalesce_gap)
        self._place = place
        self.times = times

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        if self.times and key.endswith(".safetensors") and start <= self._place < start + len(buffer):
            self.times -= 1
            buffer[self._place - start] ^= 1


@settings(max_examples=num_examples(80))
@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    block_bytes=st.integers(4096, 9000),
    step_bytes=st.integers(100, 20_000),
    coalesce_gap=st.sampled_from([0, 2**20]),
    place=st.floats(0, 1, exclude_max=True),
    times=st.sampled_from([0, 1, 99]),
)
def test_a_wrong_bit_costs_a_second_read_or_the_restore(
    lengths: list[int], block_bytes: int, step_bytes: int, coalesce_gap: int, place: float, times: int
) -> None:
    state = {f"t{n}": torch.arange(length).to(torch.uint8) for n, length in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as name:
        shard = Path(name) / "m.safetensors"
        safetensors.torch.save_file(state, shard)
        write_manifest(name, block_bytes=block_bytes)
        header_bytes = shard.stat().st_size - sum(lengths)
        wrong = header_bytes + int(place * sum(lengths))
        connector = Flipping(Path(name), coalesce_gap, wrong, times if sum(lengths) else 0)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with patch.object(stages, "_STEP_BYTES", step_bytes):
        if times < 99 or not sum(lengths):
            loaderkit.restore("memory://", into, connectors={"memory": connector}, verify=True)
            assert all(torch.equal(into[name], state[name]) for name in state)
            assert connector.times == 0
        else:
            lo = wrong // block_bytes * block_bytes
            with pytest.raises(CheckpointError, match=f"is damaged: (bytes {lo} to .*, read twice|its bytes 0 to )"):
                loaderkit.restore("memory://", into, connectors={"memory": connector}, verify=True)


@settings(max_examples=num_examples(80))
@given(
    lengths=st.lists(st.integers(0, 60_000), min_size=1, max_size=5),
    block_bytes=st.integers(4096, 9000),
    place=st.none() | st.floats(0, 1, exclude_max=True),
    hashes_itself=st.booleans(),
)
def test_files_are_compared_block_by_block(
    lengths: list[int], block_bytes: int, place: float | None, hashes_itself: bool
) -> None:
    """Whether the connector hashes what it reads or not, whatever part of which block a tensor begins and ends in."""
    state = {f"t{n}": torch.arange(length).to(torch.uint8) for n, length in enumerate(lengths)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as name:
        shard = Path(name) / "m.safetensors"
        safetensors.torch.save_file(state, shard)
        write_manifest(name, block_bytes=block_bytes)
        data = bytearray(shard.read_bytes())
        wrong = len(data) - sum(lengths) + int((place or 0) * sum(lengths))
        is_damaged = place is not None and sum(lengths) > 0
        data[min(wrong, len(data) - 1)] ^= is_damaged
        shard.write_bytes(data)
        with ExitStack() as stack:
            if not hashes_itself:
                stack.enter_context(patch.object(stages, "address_of_hash", lambda: None))
            if is_damaged:
                lo = wrong // block_bytes * block_bytes
                message = f"is damaged: (bytes {lo} to .*, read twice|its bytes {lo} to )"
                stack.enter_context(pytest.raises(CheckpointError, match=message))
            loaderkit.restore(name, into, verify=True)
    assert is_damaged or all(torch.equal(into[name], state[name]) for name in state)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("coalesce_gap", "is_whole"), [(2**20, True), (4096, False)])
def test_of_a_store_that_answers_late_no_range_is_divided(
    tmp_path: Path, is_packed: bool, coalesce_gap: int, is_whole: bool
) -> None:
    (tmp_path / "c").mkdir()
    safetensors.torch.save_file({"big": torch.ones(6_000_000)}, tmp_path / "c" / "m.safetensors")
    write_manifest(tmp_path / "c")
    pack(sorted((tmp_path / "c").iterdir()), tmp_path / "c", tmp_path / "c.tar")
    lengths: list[int] = []

    class Counting(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            lengths.append(len(buffer))
            super().read_into(key, start, buffer, etag=etag)

    connector = Counting(tmp_path)
    connector.traits = ConnectorTraits(coalesce_gap=coalesce_gap)
    restored = loaderkit.restore(f"memory://c{'.tar' * is_packed}", connectors={"memory": connector}, verify=True)
    assert torch.equal(restored["big"], torch.ones(6_000_000))
    assert (max(lengths) > stages._STEP_BYTES) is is_whole
