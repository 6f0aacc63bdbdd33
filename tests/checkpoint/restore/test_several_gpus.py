"""Tensors on several GPUs of one process: each is whole when a restore returns, and no other GPU is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_programs
import torch
from checkpoint_states import saved
from fake_gpus import FakeGpus
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import StreamReader
from loaderkit.checkpoint.restore.source import OpenCheckpoint


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    with FakeGpus().installed() as installed:
        yield installed


@pytest.fixture
def wanted() -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.randn(40_000 + n) for n in range(12)}


@pytest.fixture
def path(tmp_path: Path, wanted: dict[str, torch.Tensor]) -> Path:
    (tmp_path / "x.pt").write_bytes(saved(wanted))
    return tmp_path / "x.pt"


def targets(gpus: FakeGpus, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros, in turn on GPUs 1 and 2, as `device_map` spreads a model."""
    return {name: gpus.put(torch.zeros_like(tensor), 1 + n % 2) for n, (name, tensor) in enumerate(wanted.items())}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["restore", "cast", "load"])
def test_staging_memory_is_not_used_again_before_the_copies_are_made(
    gpus: FakeGpus, path: Path, wanted: dict[str, torch.Tensor], kind: str
) -> None:
    dtype = torch.float64 if kind == "cast" else torch.float32
    into = targets(gpus, {name: tensor.to(dtype) for name, tensor in wanted.items()})
    if kind == "load":
        load(dict(into), storage_reader=StreamReader(path, memory="1MiB"), no_dist=True)
    else:
        loaderkit.restore(path, into, dtype="target", memory="512KiB", concurrency=2)
    gpus.finish()  # what nobody has waited for is copied from what is in the staging memory now
    assert all(torch.equal(into[name], tensor.to(dtype)) for name, tensor in wanted.items())
    assert {device.index for device, _, _ in gpus.copies} == {1, 2}
    assert all(stream in gpus.streams for _, stream, _ in gpus.copies), "not on the stream of the training"
    assert gpus.contexts == {1, 2}


def test_with_an_error_the_copies_are_waited_for_too(
    gpus: FakeGpus, path: Path, wanted: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's memory is gone then."""
    place = "loaderkit.checkpoint.transfer.stages.place_span"

    def fail(span: object, data: object, connector: object) -> None:
        monkeypatch.undo()
        gpus.current_stream(gpus.devices[2]).put(lambda: done.append(1))
        raise loaderkit.errors.CheckpointError("damaged")

    done: list[int] = []
    monkeypatch.setattr(place, fail)
    with pytest.raises(loaderkit.errors.CheckpointError, match="damaged"):
        loaderkit.restore(path, targets(gpus, wanted), concurrency=1)
    assert done == [1]


def test_copies_are_from_pinned_memory_which_is_given_back(
    gpus: FakeGpus, path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    loaderkit.restore(path, targets(gpus, wanted))
    assert all(pinned for _, _, pinned in gpus.copies)
    assert gpus.num_registered > 0
    assert gpus.registered == {}


@pytest.mark.parametrize("most_pinned", [0, 100_000])
def test_where_memory_cannot_be_pinned_it_goes_on(
    path: Path, wanted: dict[str, torch.Tensor], most_pinned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeGpus(most_pinned=most_pinned).installed() as gpus:
        into = targets(gpus, wanted)
        loaderkit.restore(path, into, memory="512KiB", concurrency=2)
        gpus.finish()
        assert all(torch.equal(into[name], tensor) for name, tensor in wanted.items())
    assert caplog.text.count("cannot be pinned (CUDA error 2)") <= 2
    assert "cannot be pinned" in caplog.text


def test_streams_are_used_again(gpus: FakeGpus, path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """What a cast needs is cached for its stream, so the next restore has to have the same."""
    for _ in range(5):
        loaderkit.restore(path, targets(gpus, wanted), memory="512KiB", concurrency=2)
        with OpenCheckpoint.open(path, None, "2GiB", "auto") as source:
            session = source.transfer_new([*wanted], gpus.devices[1], None)
            assert len(list(session)) > 0
            session.close()
    used = {id(stream) for _, stream, _ in gpus.copies}
    assert len(used) == len(gpus.streams) == 2


def test_new_tensors_are_the_callers_on_its_own_stream(
    gpus: FakeGpus, path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """They are made on the default stream: dropped while kernels of another use them, their memory would be used again."""
    stream: Any = torch.cuda.Stream("cuda:1")  # type: ignore[no-untyped-call]
    with torch.cuda.device("cuda:1"), torch.cuda.stream(stream):
        made = loaderkit.restore(path, device="cuda:1")
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())
    assert sorted(gpus.handed_over) == sorted((made[name].data_ptr(), stream) for name in wanted)


def test_on_several_ranks(path: Path) -> None:
    assert rank_programs.run_ranks(rank_programs.restore_to_several_gpus, 2, path.parent, path.name) == [0, 0]
