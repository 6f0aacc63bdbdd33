"""Tensors on a GPU: through pinned staging memory, cast there, complete when `restore` returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from of_states import saved

import loaderkit

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
    found = loaderkit.restore(path, device="cuda", dtype=dtype, memory=memory)
    assert all(found[name].is_cuda and torch.equal(found[name].cpu(), wanted[name]) for name in wanted)
    assert found["turned"].data_ptr() == found["t1"].data_ptr()


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


def test_a_device_there_is_not(path: Path) -> None:
    with pytest.raises(loaderkit.errors.ConfigError, match="device"):
        loaderkit.restore(path, device="cuda:99")
