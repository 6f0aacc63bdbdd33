"""Copies of states in memory that is kept."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_states import flat_states, same
from hypothesis import given

from loaderkit.checkpoint.save import staging
from loaderkit.checkpoint.save.memory import PartBuffers
from loaderkit.checkpoint.save.staging import HostCopies


@given(flat_states(), flat_states())
def test_copies_are_equal_and_share_nothing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    copies = HostCopies()
    kept = []
    for state in (first, second, first):
        copy = copies.copy({"state": state})["state"]
        kept.append((copy, {name: tensor.clone() for name, tensor in state.items()}))
    for copy, wanted in kept:  # those made later have not changed it
        assert copy.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert same(copy[name], tensor)
            assert copy[name].is_contiguous()


def test_large_tensors_are_copied_in_pieces(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads. Tensors that do not lie in order, or whose bytes are not their values, are copied by torch."""
    monkeypatch.setattr(staging, "_PIECE_BYTES", 2**16)
    copies = HostCopies()
    for _ in range(5):
        state: dict[str, torch.Tensor] = {}
        for number in range(rng.randrange(1, 8)):
            size = rng.choice([staging._BY_ONE_THREAD + rng.randrange(-1, 2), rng.randrange(1, 300_000)])
            dtype = rng.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
            tensor = torch.randint(0, 2, (size + 2,)).to(dtype)[rng.randrange(2) :]
            state[f"plain {number}"] = tensor
            state[f"transposed {number}"] = tensor[: size // 2 * 2].view(2, -1).t()
            state[f"strided {number}"] = tensor[: size // 24 * 24].view(2, 3, -1, 4).permute(0, 3, 1, 2)
            state[f"expanded {number}"] = tensor[:7].expand(rng.randrange(1, 9000), -1)
            if dtype.is_complex:
                state[f"conjugated {number}"] = tensor.conj()
        copy = copies.copy(state)
        wanted = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.zero_()
        assert all(same(copy[name], tensor) and copy[name].is_contiguous() for name, tensor in wanted.items())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_matter(device: str) -> None:
    state = {"large": torch.arange(100_000.0), "none": torch.empty(0, 3)}
    with torch.device(device):
        copy = HostCopies().copy(state)
    assert torch.equal(copy["large"], state["large"])
    assert copy["none"].device.type == "cpu"


def test_a_copy_is_made_where_no_thread_may_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the interpreter ends, when a program may save once more."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = {str(number): torch.arange(10.0**7) + number for number in range(3)}
    monkeypatch.setattr(threading.Thread, "start", refused)
    copy = HostCopies().copy(state)
    assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())


class Pair(NamedTuple):
    a: Any
    b: Any


class Owner:
    def __init__(self) -> None:
        self.weights = torch.ones(3)


def test_states_keep_their_form() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state: dict[Any, Any] = {
        "table": OrderedDict(z=tied, a=[1, {"x": tied}]),
        "pair": Pair(tied, "text"),
        "parameter": torch.nn.Parameter(tied, requires_grad=True),
        "owner": Owner(),
        "view": tied.t(),
        5: (tied, None),
    }
    copy = HostCopies().copy(state)
    assert list(copy) == list(state)
    assert list(copy["table"]) == ["z", "a"]
    assert isinstance(copy["table"], OrderedDict)
    assert isinstance(copy["pair"], Pair)
    assert copy["table"]["z"] is copy["table"]["a"][1]["x"] is copy["pair"].a is copy[5][0]
    assert copy["parameter"].data_ptr() == copy["pair"].a.data_ptr()
    assert torch.equal(copy["view"], tied.t())
    state["owner"].weights.fill_(2)
    tied.fill_(-1)
    state["table"]["a"][0] = 9
    assert copy["owner"].weights.eq(1).all()
    assert copy["pair"].a.flatten().tolist() == list(range(6))
    assert copy["table"]["a"][0] == 1


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    copies = HostCopies()
    state = {"w": torch.ones(1000), "v": torch.zeros(17)}
    first = copies.copy(state)
    address = first["w"].data_ptr()
    second = copies.copy(state)
    assert second["w"].data_ptr() != address
    part = first["w"][500:501]
    del first
    third = copies.copy(state)
    assert third["w"].data_ptr() not in (address, second["w"].data_ptr())
    assert part.item() == 1
    del part, second, third
    addresses = set()
    for _ in range(10):
        addresses.add(copies.copy(state)["w"].data_ptr())
    assert len(addresses) == 1
    smaller = copies.copy({"w": torch.ones(10)})
    assert smaller["w"].data_ptr() in addresses


def test_buffers_are_kept_and_begin_at_a_page() -> None:
    buffers = PartBuffers()
    addresses = []
    for num_bytes in (8192, 100, 8192):
        with buffers.buffer(num_bytes) as one, buffers.buffer(num_bytes) as other:
            assert len(one) >= num_bytes
            assert len(other) >= num_bytes
            assert one.ctypes.data % 4096 == other.ctypes.data % 4096 == 0
            addresses.append({one.ctypes.data, other.ctypes.data})
    assert addresses[0] == addresses[1] == addresses[2]
    with buffers.buffer(10_000) as one:
        assert len(one) >= 10_000
