"""Tensors on a GPU: through pinned staging memory, cast there, complete when `restore` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_programs
import torch
from checkpoint_states import saved
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit._internal.cuda import host_pages
from loaderkit.checkpoint import StreamReader
from loaderkit.checkpoint.flush.shared_pages import SharedPages
from loaderkit.checkpoint.save.staging import HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {f"t{n}": torch.randn(700, 900 * n + 1, generator=generator) for n in range(8)}
    (tmp_path / "x.pt").write_bytes(saved(state | {"turned": state["t1"].t(), "n": torch.arange(7)}))
    return tmp_path / "x.pt"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("memory", ["4MiB", "2GiB"])
def test_equals_what_the_cpu_gets(path: Path, dtype: str | None, memory: str) -> None:
    wanted = loaderkit.restore(path, dtype=dtype)
    restored = loaderkit.restore(path, device="cuda", dtype=dtype, memory=memory)
    assert all(restored[name].is_cuda and torch.equal(restored[name].cpu(), wanted[name]) for name in wanted)
    assert restored["turned"].data_ptr() == restored["t1"].data_ptr()


def test_in_place_and_strided(path: Path) -> None:
    wanted = loaderkit.restore(path)
    into = {
        name: torch.zeros([2 * size for size in tensor.shape], dtype=tensor.dtype, device="cuda")[
            tuple(slice(None, None, 2) for _ in tensor.shape)
        ]
        for name, tensor in wanted.items()
    }
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        loaderkit.restore(path, into)
        assert all(torch.equal(into[name].cpu(), wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore")
def test_what_the_caller_has_queued_is_done_first(path: Path) -> None:
    wanted = loaderkit.restore(path)
    for kind in ("restore", "load"):
        into = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in wanted.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            rank_programs.queue_work(into)
            if kind == "restore":
                loaderkit.restore(path, into)
            else:
                load(dict(into), storage_reader=StreamReader(path), no_dist=True)
        torch.cuda.synchronize()
        assert all(torch.equal(into[name].cpu(), tensor) for name, tensor in wanted.items()), kind


def test_what_every_rank_has_queued_is_done_first(path: Path) -> None:
    assert rank_programs.run_ranks(rank_programs.restore_over_queued_work, 2, path.parent, path.name) == [0, 0]


def test_a_device_there_is_not(path: Path) -> None:
    with pytest.raises(loaderkit.errors.ConfigError, match="device"):
        loaderkit.restore(path, device="cuda:99")


def test_no_memory_is_left_cached_for_streams_that_nobody_has(path: Path) -> None:
    reserved = []
    for _ in range(8):
        restored = loaderkit.restore(path, device="cuda", dtype="bfloat16", memory="64MiB")
        del restored
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


@pytest.mark.parametrize("allocate", [None, SharedPages().allocate], ids=["thread", "process"])
def test_a_state_is_copied_over_the_borders_of_what_is_pinned(
    allocate: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_pages, "_SLICE_BYTES", 2**20)
    state = {f"t{n}": torch.randn(300_000 * n + 1, device="cuda") for n in range(8)}
    state["turned"] = torch.randn(700, 900, device="cuda").t()
    wanted = {name: tensor.cpu() for name, tensor in state.items()}
    copies = HostCopies(allocate)
    for _ in range(3):
        copy = copies.copy(state)
        assert all(torch.equal(copy[name], tensor) for name, tensor in wanted.items())
        assert copy["t7"].is_pinned()
        del copy
    assert "cannot be pinned" not in caplog.text
