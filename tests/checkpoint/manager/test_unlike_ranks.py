"""Ranks that hold other values under one name: those of the lowest rank are saved, whole, and it is said; never a mixture."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kept_plan import Job, job, kept_messages

import loaderkit
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.checkpoint.save.safetensors import layout
from loaderkit.checkpoint.save.tensor_bytes import sample_of

SIZES = st.sampled_from([1, 7, 512, 513, 1264, 4096, 100_000, 300_000])
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]


def tensor_of(seed: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    noise = torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(seed + 1))
    return data.to(dtype) if dtype == torch.bool else (noise * 2 + data).to(dtype)


def assert_saved(ranks: Job, expected: dict[str, torch.Tensor]) -> None:
    restored = loaderkit.restore(ranks.last, verify=True)
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(restored[name], value), name


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
@settings(max_examples=6, deadline=None)
@given(num_ranks=st.integers(2, 4), data=st.data())
def test_what_differs_is_that_of_the_lowest_rank(
    tmp_path_factory: pytest.TempPathFactory, kind: Format, num_ranks: int, data: st.DataObject
) -> None:
    """Names that all have alike, that some or all have of their own, and tied ones; what differs changes between saves."""
    sizes = data.draw(st.lists(SIZES, min_size=3, max_size=8))
    kinds = [dtype for dtype in DTYPES if kind == "dcp" or not dtype.is_complex]
    dtypes = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    first = [data.draw(st.integers(0, num_ranks - 1)) for _ in sizes]  # the lowest rank that has it

    folder = tmp_path_factory.mktemp("unlike")
    # Small parts of a state have a file of each rank, too.
    with pytest.MonkeyPatch.context() as patch, job(folder, num_ranks, kind=kind) as ranks:
        patch.setattr(layout, "MIN_FILE_BYTES", 1)
        for _ in range(4):
            odd = [data.draw(st.sets(st.integers(1, num_ranks - 1))) for _ in sizes]  # ranks with values of their own
            states: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
            expected: dict[str, torch.Tensor] = {}
            for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
                for rank in range(first[number], num_ranks):
                    seed = 1000 * (rank + 1) if rank in odd[number] else 0
                    states[rank][f"w{number}"] = tensor = tensor_of(seed + number, size, dtype)
                    if number == 0:
                        states[rank]["tied"] = tensor
                    expected.setdefault(f"w{number}", tensor)
            expected["tied"] = expected["w0"]

            assert ranks.save(states) == [None] * num_ranks
            assert_saved(ranks, expected)


def test_it_is_said_once_and_the_plan_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the running means of a batch norm are, which each rank has of its own."""
    caplog.set_level(logging.WARNING, "loaderkit")
    with job(tmp_path, 3) as ranks:
        for seed in range(4):
            weight = tensor_of(seed, 50_000, torch.float32)
            states = [
                {"weight": weight.clone(), "mean": tensor_of(100 * rank + seed, 64, torch.float32) + rank}
                for rank in range(3)
            ]
            assert ranks.save(states) == [None] * 3
            assert_saved(ranks, states[0])
            if seed:
                assert ranks.posted == kept_messages(3)

    (record,) = caplog.records
    assert record.message.startswith("'mean' is a tensor of which ranks hold other values")


def test_ranks_that_come_apart_agree_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "loaderkit")
    with job(tmp_path, 2) as ranks:
        states = [{"weight": tensor_of(1, 90_000, torch.float32)} for _ in range(2)]
        assert ranks.save(states) == [None] * 2
        states[1]["weight"] = states[1]["weight"] + 1
        assert ranks.save(states) == [None] * 2
        assert "plan/0" in ranks.posted
        assert_saved(ranks, states[0])
    assert "'weight'" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_is_of_the_elements(dtype: torch.dtype) -> None:
    """Equal for equal elements however they lie in memory; else different, as random bytes are."""
    seed, size = random.randrange(2**31), 6 * random.randrange(100, 5000)
    tensor = tensor_of(seed, size, dtype).reshape(6, -1)
    assert sample_of(tensor) == sample_of(tensor.clone()) == sample_of(tensor.t().contiguous().t())
    assert sample_of(tensor) != sample_of(tensor_of(seed + 7, size, dtype).reshape(6, -1)), seed


def test_a_sample_of_conjugates() -> None:
    tensor = torch.randn(40, dtype=torch.complex64)
    assert sample_of(tensor.conj()) == sample_of(tensor.conj().resolve_conj()) != sample_of(tensor)
